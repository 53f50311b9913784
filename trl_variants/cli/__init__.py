"""The command line. Each verb lives in a module of its own, imported when it runs, so that others start quickly."""
