"""Recurrent networks, sequences of several lengths, checkpointing and blocks that stand twice."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.models.registry import Made, case, tokens, vectors


class Recurrent(nn.Module):
    def __init__(self, kind, outputs=2, **options):
        super().__init__()
        self.layer = kind(4, 8, batch_first=True, **options)
        self.head = nn.Linear(16 if self.layer.bidirectional else 8, outputs)

    def forward(self, inputs):
        return self.head(self.layer(inputs)[0])


def series(draw, step):
    inputs = torch.randn(3, 6, 4, generator=draw)
    return inputs, torch.sin(inputs.cumsum(1))[..., :2]


@case("torch")
def lstm_of_two_layers():
    return Made(Recurrent(nn.LSTM, num_layers=2), series, F.mse_loss)


@case("torch")
def gru():
    return Made(Recurrent(nn.GRU), series, F.mse_loss)


@case("torch")
def rnn():
    return Made(Recurrent(nn.RNN, nonlinearity="relu"), series, F.mse_loss)


@case("torch", random=True)
def lstm_with_dropout():
    return Made(Recurrent(nn.LSTM, num_layers=2, dropout=0.5), series, F.mse_loss)


class Packed(Recurrent):
    def forward(self, inputs, lengths):
        packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=inputs.shape[1])[0])


@case("torch")
def bidirectional_lstm_packed():
    def batch(draw, step):
        return *series(draw, step), torch.randint(1, 7, (3,), generator=draw)

    def loss(module, batch):
        inputs, targets, lengths = batch
        there = torch.arange(inputs.shape[1]) < lengths[:, None]
        return ((module(inputs, lengths) - targets)[there] ** 2).mean()

    return Made(Packed(nn.LSTM, bidirectional=True), batch, forward=loss)


@case("torch")
def ctc_loss():
    def batch(draw, step):
        inputs = torch.randn(3, 12, 4, generator=draw)
        return inputs, torch.randint(1, 5, (3, 4), generator=draw), torch.randint(1, 5, (3,), generator=draw)

    def criterion(output, targets, lengths):
        steps = torch.full((3,), output.shape[1])
        return F.ctc_loss(output.log_softmax(-1).transpose(0, 1), targets, steps, lengths)

    return Made(Recurrent(nn.LSTM, outputs=5), batch, criterion)


@case("torch")
def lengths_differ_between_steps():
    def batch(draw, step):
        inputs = torch.randn(3, 3 + step, 4, generator=draw)
        return inputs, torch.sin(inputs.cumsum(1))[..., :2]

    return Made(Recurrent(nn.GRU), batch, F.mse_loss)


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 8)
        self.head = nn.Linear(8, 2)
        self.register_buffer("hidden", torch.zeros(3, 8))

    def forward(self, inputs):
        hidden, outputs = self.hidden, []
        for row in inputs.unbind(1):
            hidden = self.cell(row, hidden)
            outputs.append(self.head(hidden))
        self.hidden = hidden.detach()
        return torch.stack(outputs, 1)


@case("torch")
def hidden_state_kept_between_steps():
    return Made(Remembering(), series, F.mse_loss)


class Blocks(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.options = options

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(2):
            x = checkpoint(self.block, x, **self.options) if self.options else self.block(x)
        return self.head(x)


def next_token(module, batch):
    ids = batch["input_ids"]
    return F.cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@case("torch")
def block_that_stands_twice():
    return Made(Blocks(), tokens(11, 7), forward=next_token)


@case("torch")
def checkpoint_reentrant():
    return Made(Blocks(use_reentrant=True), tokens(11, 7), forward=next_token)


@case("torch")
def checkpoint_not_reentrant():
    return Made(Blocks(use_reentrant=False), tokens(11, 7), forward=next_token)


@case("torch", random=True)
def checkpoint_with_dropout():
    module = Blocks(use_reentrant=False)
    module.block.dropout.p = 0.5
    return Made(module, tokens(11, 7), forward=next_token)


@case("torch")
def transformer_encoder_and_decoder():
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
            self.between = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

        def forward(self, ids):
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            x = self.embed(ids)
            return self.head(self.between(x, x, tgt_mask=mask, tgt_is_causal=True))

    return Made(Translator(), tokens(11, 7), forward=next_token)


class Experts(nn.Module):
    """Each row goes to one expert, chosen by a boolean index."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(3))

    def forward(self, inputs):
        weights = self.router(inputs).softmax(-1)
        chosen = weights.argmax(-1)
        output = inputs.new_zeros(len(inputs), 2)
        for i, expert in enumerate(self.experts):
            mine = chosen == i
            if mine.any():
                output[mine] = weights[mine, i, None] * expert(inputs[mine])
        return output


@case("torch")
def experts_by_boolean_index():
    return Made(Experts(), vectors(4, 2, 8), F.mse_loss)
