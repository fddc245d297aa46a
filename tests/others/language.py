"""Language models, small and with random weights."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tests.models.registry import Made, tokens
from tests.others.harness import model


def llama(**options: Any) -> nn.Module:
    t = importlib.import_module("transformers")
    small = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "pad_token_id": 0}
    return t.LlamaForCausalLM(t.LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, **small, **options))


@model("transformers", "Llama with a padding mask")
def padded() -> Made:
    def batch(draw: Generator, step: int) -> dict[str, Tensor]:
        made = tokens(50, 6)(draw, step)
        mask = torch.ones(2, 6, dtype=torch.long)
        mask[0, :2] = 0
        return made | {"attention_mask": mask}

    return Made(llama(), batch)


@model("transformers", "Llama that returns hidden states")
def hidden_states() -> Made:
    return Made(llama(output_hidden_states=True), tokens(50, 6))


@model("transformers", "Mixtral with the loss of its router")
def experts() -> Made:
    t = importlib.import_module("transformers")
    config = t.MixtralConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                             num_key_value_heads=1, num_local_experts=3, output_router_logits=True, pad_token_id=0)  # fmt: skip
    return Made(t.MixtralForCausalLM(config), tokens(50, 6))


@model("transformers", "Mamba")
def mamba() -> Made:
    t = importlib.import_module("transformers")
    return Made(t.MambaForCausalLM(t.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4, pad_token_id=0)), tokens(50, 6))  # fmt: skip


@model("peft, transformers", "`IA3` on Llama")
def few_parameters() -> Made:
    peft = importlib.import_module("peft")
    config = peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
    return Made(peft.get_peft_model(llama(), config), tokens(50, 6))


@model("peft, transformers", "LoRA on the `target_parameters` of experts", special="`overwritten=` the experts' weight, which peft touches")  # fmt: skip
def adapted_experts() -> Made:
    t, peft = importlib.import_module("transformers"), importlib.import_module("peft")
    config = t.MixtralConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                             num_key_value_heads=1, num_local_experts=3, pad_token_id=0)  # fmt: skip
    adapters = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    net = peft.get_peft_model(t.MixtralForCausalLM(config), peft.LoraConfig(r=2, init_lora_weights=False, **adapters))
    touched = tuple(name for name, _ in net.named_parameters() if name.endswith("base_layer.gate_up_proj"))
    return Made(net, tokens(50, 6), overwritten=touched)


@model("trl, peft, transformers", "`compute_loss` of a `DPOTrainer`, adapters on Llama")
def preferences() -> Made:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from trl import DPOConfig, DPOTrainer

    t, peft = importlib.import_module("transformers"), importlib.import_module("peft")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(50)}, unk_token="w1"))
    tokenizer = t.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", unk_token="w1")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    options = DPOConfig("dpo", report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False)
    rows = Dataset.from_dict({"prompt": ["w3 w4"] * 2, "chosen": ["w5 w6"] * 2, "rejected": ["w7 w8 w9"] * 2})
    trainer = DPOTrainer(peft.get_peft_model(llama(), config), args=options, train_dataset=rows, processing_class=tokenizer)  # fmt: skip

    def batch(draw: Generator, step: int) -> Any:
        def ids() -> list[int]:
            return torch.randint(3, 50, (3,), generator=draw).tolist()

        return trainer.data_collator([{"prompt_ids": ids(), "chosen_ids": ids(), "rejected_ids": ids()} for _ in range(3)])  # fmt: skip

    return Made(trainer.model, batch, forward=lambda net, b: trainer.compute_loss(net, dict(b)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(20, 8)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return features | {"sentence_embedding": self.embedding(features["input_ids"])}


def pairs(draw: Generator, step: int) -> tuple[Tensor, ...]:
    a, b = torch.randint(20, (2, 4, 5), generator=draw)
    return a, b, torch.rand(4, generator=draw)


def loss_of_pairs(loss: nn.Module, batch: Any) -> Tensor:
    features = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in batch[:2]]
    return loss(features, batch[2])


@model("sentence-transformers, transformers", "bag of words with `CosineSimilarityLoss`")
def sentences() -> Made:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import CosineSimilarityLoss

    return Made(
        CosineSimilarityLoss(SentenceTransformer(modules=[Words()], device="cpu")), pairs, forward=loss_of_pairs
    )


@model("sentence-transformers, transformers", "`CachedMultipleNegativesRankingLoss` in `MatryoshkaLoss`")
def cached_sentences() -> Made:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, MatryoshkaLoss

    net = SentenceTransformer(modules=[Words()], device="cpu")
    loss = MatryoshkaLoss(net, CachedMultipleNegativesRankingLoss(net, mini_batch_size=2), matryoshka_dims=[8, 4])
    return Made(loss, pairs, forward=loss_of_pairs)


@model("x-transformers", "decoder with rotary positions and dropout", random=True)
def dropping() -> Made:
    x = importlib.import_module("x_transformers")
    layers = x.Decoder(dim=16, depth=2, heads=2, rotary_pos_emb=True, attn_dropout=0.3)
    net = x.AutoregressiveWrapper(x.TransformerWrapper(num_tokens=50, max_seq_len=7, attn_layers=layers))
    return Made(net, lambda draw, step: torch.randint(50, (2, 7), generator=draw), forward=lambda net, ids: net(ids))
