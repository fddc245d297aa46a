"""x-transformers and torch_geometric."""

import torch
from torch.nn import functional as F

from tests.models.registry import Made, case, tokens

WORDS = 40


def next_token(module, batch):
    ids = batch["input_ids"]
    return F.cross_entropy(module(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


@case("x-transformers")
def x_transformers_decoder():
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, rotary_pos_emb=True, attn_flash=True)
    module = TransformerWrapper(num_tokens=WORDS, max_seq_len=16, attn_layers=layers)
    return Made(module, tokens(WORDS, 12), forward=next_token)


@case("x-transformers")
def x_transformers_encoder():
    from x_transformers import Encoder, TransformerWrapper

    def batch(draw, step):
        ids = torch.randint(WORDS, (2, 12), generator=draw)
        return ids, torch.rand(2, 12, generator=draw) > 0.2, torch.randint(WORDS, (2, 12), generator=draw)

    def loss(module, batch):
        ids, there, labels = batch
        return F.cross_entropy(module(ids, mask=there)[there], labels[there])

    layers = Encoder(dim=16, depth=2, heads=2, attn_dim_head=8, use_rmsnorm=True, ff_glu=True)
    return Made(TransformerWrapper(num_tokens=WORDS, max_seq_len=16, attn_layers=layers), batch, forward=loss)


@case("x-transformers")
def x_transformers_generator():
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=1, heads=2, attn_dim_head=8)
    module = AutoregressiveWrapper(TransformerWrapper(num_tokens=WORDS, max_seq_len=16, attn_layers=layers))
    return Made(module, tokens(WORDS, 12), forward=lambda module, batch: module(batch["input_ids"]))


def graph(draw, step):
    """Nodes and two-way edges; nobody is its own neighbor."""
    ends = torch.randint(6, (2, 8), generator=draw)
    ends[1] = torch.where(ends[0] == ends[1], (ends[1] + 1) % 6, ends[1])
    return torch.randn(6, 4, generator=draw), torch.cat([ends, ends.flip(0)], 1), torch.randint(3, (6,), generator=draw)


def of_nodes(*layers):
    class OfNodes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(layers)

        def forward(self, nodes, edges):
            for layer in self.layers[:-1]:
                nodes = layer(nodes, edges).relu()
            return self.layers[-1](nodes, edges)

    return Made(OfNodes(), graph, forward=lambda module, batch: F.cross_entropy(module(*batch[:2]), batch[2]))


@case("torch_geometric")
def graph_convolutions():
    from torch_geometric.nn import GCNConv

    return of_nodes(GCNConv(4, 8), GCNConv(8, 3))


@case("torch_geometric")
def graph_attention():
    from torch_geometric.nn import GATConv

    return of_nodes(GATConv(4, 4, heads=2), GATConv(8, 3))


@case("torch_geometric")
def graphs_in_a_batch():
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv, global_mean_pool

    class OfGraphs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = GCNConv(4, 8), torch.nn.Linear(8, 2)

        def forward(self, data):
            return self.head(global_mean_pool(self.layer(data.x, data.edge_index).relu(), data.batch))

    def batch(draw, step):
        ones = [graph(draw, step)[:2] for _ in range(3)]
        return torch.stack([x for x, _ in ones]), torch.stack([e for _, e in ones]), torch.randn(3, 2, generator=draw)

    def loss(module, batch):
        nodes, edges, targets = batch
        data = Batch.from_data_list([Data(x=x, edge_index=e) for x, e in zip(nodes, edges, strict=True)])
        return F.mse_loss(module(data), targets)

    return Made(OfGraphs(), batch, forward=loss)
