"""Graph networks of torch_geometric: each convolution once in a network of two layers, and its ready-made models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from model_runner import Case, draw
from torch import Tensor, nn
from torch.nn import functional as F

EDGES = torch.tensor([[1, 4, 0, 2, 1, 4, 3, 0], [0, 0, 1, 1, 2, 3, 4, 4]])  # sorted by their ends
KINDS = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0])
CLASSES = torch.tensor([0, 1, 2, 0, 1])
NODES, WIDTH = 5, 4


class TwoLayers(nn.Module):
    """conv, ReLU, conv."""

    def __init__(self, first: nn.Module, second: nn.Module, extra: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self.first, self.second, self.extra = first, second, extra

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x, EDGES, **self.extra())
        h = h[0] if isinstance(h, tuple) else h
        y = self.second(h.relu(), EDGES, **self.extra())
        return y[0] if isinstance(y, tuple) else y


def conv(name: str, *args: Any, extra: Callable[[], dict[str, Any]] = dict, heads: int = 1, **options: Any) -> Case:
    def make() -> nn.Module:
        from torch_geometric import nn as gnn

        layers = [getattr(gnn, name)(a, b, *args, **options) for a, b in ((WIDTH, 6), (6 * heads, 3))]
        return TwoLayers(*layers, extra)

    return Case("torch_geometric", name, make, classify)


def classify(model: nn.Module) -> Tensor:
    y = model(draw(NODES, WIDTH))
    return F.cross_entropy(y, CLASSES % y.shape[1])


def mlp(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Linear(a, 6), nn.Tanh(), nn.Linear(6, b))


def made(name: str, make: Callable[[Any], nn.Module], loss: Callable[[nn.Module], Tensor]) -> Case:
    def build() -> nn.Module:
        from torch_geometric import nn as gnn

        return make(gnn)

    return Case("torch_geometric", name, build, loss)


def on_graph(model: nn.Module) -> Tensor:
    y = model(draw(NODES, WIDTH), EDGES)
    return F.cross_entropy(y, CLASSES % y.shape[1])


def adjacency() -> Tensor:
    return torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(8), (NODES, NODES)).to_sparse_csr()


def on_adjacency(model: nn.Module) -> Tensor:
    return F.cross_entropy(model.second(model.first(draw(NODES, WIDTH), adjacency()).relu(), adjacency()), CLASSES)


def with_edges() -> dict[str, Tensor]:
    return {"edge_attr": draw(8, 2, seed=2)}


def with_weights() -> dict[str, Tensor]:
    return {"edge_weight": draw(8, seed=2).abs()}


def with_kinds() -> dict[str, Tensor]:
    return {"edge_type": KINDS}


def molecule(model: nn.Module) -> Tensor:
    energy = model(torch.tensor([1, 6, 8, 1, 6]), draw(NODES, 3), torch.tensor([0, 0, 0, 1, 1]))
    return F.mse_loss(energy, draw(*energy.shape, seed=3))


def points(gnn: Any) -> nn.Module:
    return TwoLayers(gnn.PointNetConv(mlp(WIDTH + 3, 6), mlp(6, 6)), gnn.PointNetConv(mlp(9, 6), mlp(6, 3)), dict)


def on_points(model: nn.Module) -> Tensor:
    place = draw(NODES, 3, seed=5)
    y = model.second(model.first(draw(NODES, WIDTH), place, EDGES).relu(), place, EDGES)
    return F.cross_entropy(y, CLASSES)


def pooled(model: nn.Module) -> Tensor:
    y = model(draw(NODES, WIDTH), torch.tensor([0, 0, 0, 1, 1]))
    return F.mse_loss(y, draw(*y.shape, seed=3))


CASES = [
    conv("ARMAConv"),
    conv("ChebConv", 3),
    conv("ClusterGCNConv"),
    conv("FeaStConv", heads=1),
    conv("FiLMConv"),
    conv("GATConv", edge_dim=2, extra=with_edges, dropout=0.2),
    conv("GATv2Conv", edge_dim=2, extra=with_edges, dropout=0.2),
    conv("GCNConv", extra=with_weights),
    conv("GCNConv")._replace(name="GCNConv, sparse adjacency", loss=on_adjacency),
    conv("GENConv", edge_dim=2, extra=with_edges),
    conv("GeneralConv"),
    conv("GraphConv", extra=with_weights),
    conv("HypergraphConv"),
    conv("LEConv"),
    conv("MFConv"),
    conv("PDNConv", 2, 4, extra=with_edges),
    conv("RGATConv", 2, extra=with_kinds),
    conv("RGCNConv", 2, extra=with_kinds),
    conv("ResGatedGraphConv"),
    conv("SAGEConv"),
    conv("SAGEConv")._replace(name="SAGEConv, sparse adjacency", loss=on_adjacency),
    conv("SAGEConv", "max")._replace(name="SAGEConv, max"),
    conv("SAGEConv", "lstm")._replace(name="SAGEConv, LSTM"),
    conv("SGConv", 2),
    conv("SSGConv", 0.1),
    conv("SuperGATConv"),
    conv("TAGConv"),
    conv("TransformerConv", edge_dim=2, extra=with_edges, beta=True),
    made("GINConv", lambda g: TwoLayers(g.GINConv(mlp(4, 6), train_eps=True), g.GINConv(mlp(6, 3)), dict), classify),
    made(
        "GINEConv",
        lambda g: TwoLayers(g.GINEConv(mlp(4, 6), edge_dim=2), g.GINEConv(mlp(6, 3), edge_dim=2), with_edges),
        classify,
    ),
    made("NNConv", lambda g: TwoLayers(g.NNConv(4, 6, mlp(2, 24)), g.NNConv(6, 3, mlp(2, 18)), with_edges), classify),
    made("EdgeConv", lambda g: TwoLayers(g.EdgeConv(mlp(8, 6)), g.EdgeConv(mlp(12, 3)), dict), classify),
    made("GatedGraphConv", lambda g: TwoLayers(g.GatedGraphConv(4, 2), g.GatedGraphConv(4, 1), dict), classify),
    made("PNAConv", lambda g: TwoLayers(pna(g, 4, 6), pna(g, 6, 3), dict), classify),
    made("GPSConv", lambda g: TwoLayers(gps(g), gps(g), dict), classify),
    made("PointNetConv", points, on_points),
    made("GCN", lambda g: g.GCN(4, 6, 2, 3, dropout=0.2, norm="batch"), on_graph),
    made("GraphSAGE", lambda g: g.GraphSAGE(4, 6, 2, 3, jk="lstm"), on_graph),
    made("GAT", lambda g: g.GAT(4, 6, 2, 3, v2=True, heads=2), on_graph),
    made("GIN", lambda g: g.GIN(4, 6, 2, 3, norm="layer"), on_graph),
    made("GraphUNet", lambda g: g.GraphUNet(4, 6, 3, depth=2), on_graph),
    made("LightGCN", lambda g: g.LightGCN(5, 4, 2), lambda model: -model(EDGES).sigmoid().log().mean()),
    made("SchNet", lambda g: g.SchNet(8, 8, 2, 6, interaction_graph=all_pairs), molecule),
    made("AttentionalAggregation", lambda g: g.AttentionalAggregation(nn.Linear(4, 1), nn.Linear(4, 3)), pooled),
    made("Set2Set", lambda g: g.Set2Set(4, 2), pooled),
    made("SoftmaxAggregation", lambda g: g.SoftmaxAggregation(learn=True, channels=4), pooled),
]


def pna(gnn: Any, a: int, b: int) -> nn.Module:
    return gnn.PNAConv(a, b, ["mean", "max", "std"], ["identity", "amplification"], deg=torch.tensor([0, 2, 3]))


def gps(gnn: Any) -> nn.Module:
    return gnn.GPSConv(4, gnn.GCNConv(4, 4), heads=2)


def all_pairs(place: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """The edges within each molecule, with their lengths; the library's own search needs another package."""
    row, col = (batch[:, None] == batch).fill_diagonal_(False).nonzero().T
    return torch.stack([row, col]), (place[row] - place[col]).norm(dim=-1)
