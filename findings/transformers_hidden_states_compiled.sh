#!/usr/bin/env bash
# Software: transformers 5.23.0 (Llama, output_hidden_states=True), torch 2.13.0 (torch.compile, fullgraph=True).
# Input: a new model that is compiled before its first call, as training programs do.
# One would guess: whether a model compiles does not depend on what was called before.
# Behavior: each compiled call fails (Unsupported context manager: a lock), until the model was called once eagerly. The
# first call installs the hooks that record hidden states, under a lock that Dynamo cannot enter; later ones find them.
# The same model without output_hidden_states compiles at once.
# Output seen:
#   hidden states, compiled first: Unsupported
#   hidden states, compiled again: Unsupported
#   hidden states, compiled after one eager call: right True
#   logits alone, compiled first: right True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 transformers==5.23.0
cat > program.py <<'EOF'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ids = torch.arange(6)[None]


def model(**options):
    torch.manual_seed(0)
    small = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, **small, **options)).eval()


def compiled(call):
    torch._dynamo.reset()
    try:
        found = torch.compile(call, fullgraph=True, backend="eager")(ids)
    except torch._dynamo.exc.Unsupported:
        return "Unsupported"
    return f"right {torch.allclose(found, call(ids), atol=1e-5)}"


deep = model(output_hidden_states=True)


def last(ids):
    return deep(input_ids=ids).hidden_states[-1]


said = {"hidden states, compiled first": compiled(last), "hidden states, compiled again": compiled(last)}
last(ids)
said["hidden states, compiled after one eager call"] = compiled(last)
flat = model()
said["logits alone, compiled first"] = compiled(lambda ids: flat(input_ids=ids).logits)
for name, outcome in said.items():
    print(f"{name}: {outcome}")
assert list(said.values()) == ["Unsupported", "Unsupported", "right True", "right True"]
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
