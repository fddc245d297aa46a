"""Everything here that is private API of PyTorch, a file per topic; `names` is the list."""
