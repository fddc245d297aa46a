#!/usr/bin/env bash
# Software: PennyLane 0.45.1 (qml.qnn.TorchLayer), torch 2.13.0 (torch.func.functional_call).
# Input: a layer, and other values of the same names and shapes for its parameters.
# One would guess: functional_call computes with the values that it is given, or complains.
# Behavior: it computes with the layer's own weights, without a word. The layer reads its parameters from a dict of its
# own (`qnode_weights`) and not by attribute, and functional_call exchanges attributes. So an ensemble by vmap has equal
# members, and a traced gradient of the weights is zero. In-place changes (optimizers, load_state_dict) do arrive.
# Output seen:
#   own weights      [[-0.4756, 0.7909]]
#   functional_call  [[-0.4756, 0.7909]]
#   after copy_      [[0.0059, -0.0107]]
#   gradient by torch.func 0.0, by backward() nonzero True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 pennylane==0.45.1
cat > program.py <<'EOF'
import pennylane as qml
import torch

device = qml.device("default.qubit", wires=2)


@qml.qnode(device, interface="torch", diff_method="backprop")
def circuit(inputs, weights):
    qml.AngleEmbedding(inputs, wires=range(2))
    qml.BasicEntanglerLayers(weights, wires=range(2))
    return [qml.expval(qml.PauliZ(wires=i)) for i in range(2)]


torch.manual_seed(0)
layer, x = qml.qnn.TorchLayer(circuit, {"weights": (2, 2)}), torch.ones(1, 2)
assert [name for name, _ in layer.named_parameters()] == ["weights"]
other = {"weights": layer.weights.detach() + 1}
own, given = layer(x).detach(), torch.func.functional_call(layer, other, (x,)).detach()
traced = torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,)).sum())(other)["weights"]
layer(x).sum().backward()
by_backward = bool(layer.weights.grad.abs().sum() > 0.1)
with torch.no_grad():
    layer.weights.copy_(other["weights"])
changed = layer(x).detach()
for name, y in {"own weights": own, "functional_call": given, "after copy_": changed}.items():
    print(f"{name:16} {[[round(v, 4) for v in row] for row in y.tolist()]}")
print(f"gradient by torch.func {float(traced.abs().sum())}, by backward() nonzero {by_backward}")
assert torch.equal(given, own) and (changed - own).abs().max() > 0.1
assert not traced.any() and by_backward
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
