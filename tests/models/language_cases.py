"""transformers."""

import torch

from tests.models.registry import Made, case, tokens

WORDS = 40
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
NO_CACHE = {"use_cache": False}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | options
    sizes = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1, **NO_CACHE, **dropout))


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, **NO_CACHE, **options))


def with_checkpoints(module, reentrant):
    module.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return Made(module, tokens(WORDS, 12))


@case("transformers")
def gpt_2():
    return Made(gpt2(), tokens(WORDS, 12))


@case("transformers", random=True)
def gpt_2_with_dropout():
    return Made(gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1), tokens(WORDS, 12))


@case("transformers")
def gpt_2_checkpoints_reentrant():
    return with_checkpoints(gpt2(), True)


@case("transformers")
def gpt_2_checkpoints_not_reentrant():
    return with_checkpoints(gpt2(), False)


@case("transformers")
def llama_2_layers():
    return Made(llama(), tokens(WORDS, 12))


@case("transformers")
def llama_checkpoints_reentrant():
    return with_checkpoints(llama(), True)


@case("transformers")
def llama_checkpoints_not_reentrant():
    return with_checkpoints(llama(), False)


@case("transformers")
def mistral_with_padding():
    from transformers import MistralConfig, MistralForCausalLM

    def batch(draw, step):
        its_tokens = tokens(WORDS, 12)(draw, step)
        lengths = torch.randint(4, 13, (2, 1), generator=draw)
        there = torch.arange(12) < lengths
        labels = its_tokens["labels"].masked_fill(~there, -100)
        return its_tokens | {"attention_mask": there.long(), "labels": labels}

    config = MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=4, **NO_CACHE)
    return Made(MistralForCausalLM(config), batch)


@case("transformers")
def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SIZES, num_key_value_heads=1, num_local_experts=4, output_router_logits=True, **NO_CACHE)
    return Made(MixtralForCausalLM(config), tokens(WORDS, 12))


@case("transformers")
def bert():
    from transformers import BertConfig, BertForMaskedLM

    return Made(BertForMaskedLM(BertConfig(**SIZES, **NO_DROPOUT)), tokens(WORDS, 12))


@case("transformers")
def albert():
    from transformers import AlbertConfig, AlbertForMaskedLM

    return Made(AlbertForMaskedLM(AlbertConfig(**SIZES, embedding_size=8, **NO_DROPOUT)), tokens(WORDS, 12))


@case("transformers", random=True)
def distilbert_for_classes():
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    def batch(draw, step):
        ids = torch.randint(2, WORDS, (2, 12), generator=draw)
        return {"input_ids": ids, "labels": torch.randint(3, (2,), generator=draw)}

    config = DistilBertConfig(
        vocab_size=WORDS, max_position_embeddings=32, n_layers=2, n_heads=2, dim=16, hidden_dim=32
    )
    config.num_labels = 3
    return Made(DistilBertForSequenceClassification(config), batch)


@case("transformers")
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, **NO_CACHE)
    return Made(T5ForConditionalGeneration(config), tokens(WORDS, 12))


@case("transformers")
def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"vocab_size": WORDS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2}
    config = MambaConfig(**sizes, **NO_CACHE)
    return Made(MambaForCausalLM(config), tokens(WORDS, 12))


@case("transformers")
def vit():
    from transformers import ViTConfig, ViTForImageClassification

    def batch(draw, step):
        pixels = torch.randn(2, 3, 16, 16, generator=draw)
        return {"pixel_values": pixels, "labels": torch.randint(3, (2,), generator=draw)}

    sizes = {name: size for name, size in SIZES.items() if name not in ("vocab_size", "max_position_embeddings")}
    config = ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=3, **NO_DROPOUT)
    return Made(ViTForImageClassification(config), batch)


@case("transformers")
def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    def batch(draw, step):
        sound = torch.randn(2, 8, 24, generator=draw)
        return {"input_features": sound, "labels": torch.randint(2, WORDS, (2, 6), generator=draw)}

    layers = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    wide = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 16, "num_mel_bins": 8}
    ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    lengths = {"max_source_positions": 12, "max_target_positions": 16}
    config = WhisperConfig(vocab_size=WORDS, dropout=0.0, **layers, **wide, **ends, **lengths, **NO_CACHE)
    return Made(WhisperForConditionalGeneration(config), batch)


@case("transformers", random=True)
def wav2vec2_with_ctc():
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    def batch(draw, step):
        sound = torch.randn(2, 200, generator=draw)
        return {"input_values": sound, "labels": torch.randint(1, WORDS, (2, 5), generator=draw)}

    sizes = {name: size for name, size in SIZES.items() if name != "max_position_embeddings"}
    convolutions = {"conv_dim": (8, 8), "conv_kernel": (5, 3), "conv_stride": (3, 2), "num_conv_pos_embeddings": 4}
    config = Wav2Vec2Config(
        **sizes, **convolutions, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.3, pad_token_id=0
    )
    return Made(Wav2Vec2ForCTC(config), batch)


@case("peft")
def lora_on_gpt_2():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    return Made(get_peft_model(gpt2(), config), tokens(WORDS, 12))


@case("peft", random=True)
def lora_with_dropout_and_checkpoints():
    from peft import LoraConfig, get_peft_model

    module = llama()
    module.gradient_checkpointing_enable({"use_reentrant": True})
    module.enable_input_require_grads()
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, init_lora_weights=False)
    return Made(get_peft_model(module, config), tokens(WORDS, 12))


@case("peft")
def prompt_tuning():
    from peft import PromptTuningConfig, get_peft_model

    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return Made(get_peft_model(gpt2(), config), tokens(WORDS, 12))
