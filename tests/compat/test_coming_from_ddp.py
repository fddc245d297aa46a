"""The page "Coming from DistributedDataParallel" does what it says: its code is run, before against after."""

import re
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import decentfn as df
from tests.models.registry import import_package

pytestmark = pytest.mark.thorough

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_ddp.md"


def blocks():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def run_page():
    code: dict = {}
    for block in blocks():
        exec(block, code)
    here = df.init()

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    draw = torch.Generator().manual_seed(here.rank)
    inputs = torch.randn(20, 2, 8, 4, generator=draw)
    batches = list(zip(inputs, inputs.sum(-1, keepdim=True), strict=True))
    before = code["before"](model(), batches, here.rank)
    return (
        {k.removeprefix("module."): v.clone() for k, v in before.items()},
        code["after"](model(), batches),
        code["decentralized"](model(), batches),
    )


def test_before_and_after_are_the_same_and_one_name_makes_it_decentralized(ranks):
    results = ranks(4).run(run_page)
    for before, after, decentralized in results:
        assert before.keys() == after.keys() == decentralized.keys()
        for name, value in before.items():
            torch.testing.assert_close(after[name], value, atol=1e-5, rtol=1e-5)
    assert not torch.equal(results[0][2]["0.weight"], results[1][2]["0.weight"])


def fine_tune(folder):
    """Adapters of both, and what `save_pretrained` wrote of the second."""
    import_package("peft")
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel

    code: dict = {}
    for block in blocks():
        exec(block, code)
    here = df.init()
    torch.manual_seed(here.rank)  # another model on each, whose adapters and base rank 0's replace
    base = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )
    one = get_peft_model(base, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)).train()
    other = deepcopy(one)
    tokens = torch.randint(32, (6, 2, 4, 8), generator=torch.Generator().manual_seed(here.rank))
    batches = [[{"input_ids": x, "labels": x} for x in micros] for micros in tokens]
    code["lora_before"](one, batches, 6, folder / "ddp")
    code["lora_after"](other, batches, 6, folder / "decent")
    both = [{n: p.detach() for n, p in m.named_parameters() if p.requires_grad} for m in (one, other)]
    return *both, load_file(folder / "decent" / "adapter_model.safetensors") if here.rank == 0 else None


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_a_fine_tune_with_lora_ends_as_ddps_and_is_shorter(ranks, tmp_path):
    (before, after, written), (_, other, _) = ranks(2).run(fine_tune, tmp_path)
    for name, x in before.items():
        torch.testing.assert_close(after[name], x, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(other[name], after[name])
        assert torch.equal(written[name.replace(".default", "")], after[name]) and x.any()
    lines = {block.partition("(")[0]: block.count("\n") for block in blocks() if block.startswith("def lora")}
    assert lines["def lora_after"] < lines["def lora_before"]


def test_every_name_on_the_page_exists():
    for name in re.findall(r"df\.(\w+)", PAGE.read_text()):
        assert hasattr(df, name), name
