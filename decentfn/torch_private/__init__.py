"""Everything here that is private API of PyTorch, a file per topic.

Where a piece is missing (another version of PyTorch), the rest stays correct and gets slower: without overlap
collectives wait before they return, scalars are computed where they are used, simulations do not chunk, and every message
has new memory.
"""
