"""What autograd saves in a forward pass."""

import torch


def saved_bytes(function, module):
    """Return the bytes of storage that autograd saves in a module's forward pass, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function()
    assert result.requires_grad
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in own)
