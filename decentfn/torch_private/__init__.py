"""All uses of PyTorch's private API, one file per topic; `names` lists them."""
