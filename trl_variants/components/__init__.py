"""The built-in components: pure functions on tensors, one module per slot.

Nothing here knows about TRL, transformers, gradient accumulation or ranks.
"""
