"""PyTorch's own: recurrent networks, Transformers, and layers that few models have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from model_runner import Case, draw
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = torch.tensor([0, 2])
IMAGES = (2, 3, 8, 8)


def case(name: str, make: Callable[[], nn.Module], forward: Callable[[nn.Module], Any]) -> Case:
    """With the squared error of the first output."""

    def loss(model: nn.Module) -> Tensor:
        y = forward(model)
        while isinstance(y, tuple):
            y = y[0]
        return F.mse_loss(y, draw(*y.shape, seed=3))

    return Case("torch", name, make, loss)


def sequence(name: str, make: Callable[[], nn.Module]) -> Case:
    return case(name, make, lambda model: model(draw(3, 2, 4)))


def image(name: str, *layers: Callable[[], nn.Module]) -> Case:
    return case(name, lambda: nn.Sequential(*(layer() for layer in layers)), lambda model: model(draw(*IMAGES)))


def attend(model: nn.Module) -> Any:
    x = draw(2, 3, 8)
    return model(x, x, x)


def translate(model: nn.Module) -> Tensor:
    return model(draw(2, 3, 8), draw(2, 4, 8, seed=1), tgt_mask=nn.Transformer.generate_square_subsequent_mask(4))


def packed(model: nn.Module) -> Tensor:
    return model(nn.utils.rnn.pack_padded_sequence(draw(4, 2, 4), torch.tensor([4, 2])))[0].data


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, **options)


def decoder() -> nn.Module:
    return nn.TransformerDecoderLayer(8, 2, 12, batch_first=True)


CASES = [
    sequence("nn.RNN", lambda: nn.RNN(4, 5)),
    sequence("nn.RNN, ReLU", lambda: nn.RNN(4, 5, nonlinearity="relu")),
    sequence("nn.LSTM", lambda: nn.LSTM(4, 5)),
    sequence("nn.LSTM, 2 layers, both directions, dropout", lambda: nn.LSTM(4, 5, 2, bidirectional=True, dropout=0.3)),
    sequence("nn.LSTM, projected", lambda: nn.LSTM(4, 5, proj_size=3)),
    case("nn.LSTM, packed sequences", lambda: nn.LSTM(4, 5), packed),
    sequence("nn.GRU", lambda: nn.GRU(4, 5)),
    sequence("nn.GRU, 2 layers, both directions", lambda: nn.GRU(4, 5, 2, bidirectional=True)),
    case("nn.LSTMCell", lambda: nn.LSTMCell(4, 5), lambda model: model(draw(2, 4), model(draw(2, 4, seed=1)))),
    case("nn.GRUCell", lambda: nn.GRUCell(4, 5), lambda model: model(draw(2, 4), model(draw(2, 4, seed=1)))),
    case("nn.MultiheadAttention", lambda: nn.MultiheadAttention(8, 2, batch_first=True), attend),
    case("nn.MultiheadAttention, dropout", lambda: nn.MultiheadAttention(8, 2, 0.2, batch_first=True, add_bias_kv=True), attend),
    case("nn.TransformerEncoder", lambda: nn.TransformerEncoder(encoder(), 2), lambda model: model(draw(2, 3, 8))),
    case("nn.TransformerEncoderLayer, norm first", lambda: encoder(norm_first=True), lambda model: model(draw(2, 3, 8))),
    case("nn.TransformerEncoderLayer, GELU", lambda: encoder(activation="gelu"), lambda model: model(draw(2, 3, 8))),
    case("nn.TransformerDecoder", lambda: nn.TransformerDecoder(decoder(), 2), lambda m: m(draw(2, 3, 8), draw(2, 4, 8))),
    case("nn.Transformer", lambda: nn.Transformer(8, 2, 1, 1, 12, batch_first=True), translate),
    image(
        "Conv2d, BatchNorm2d, MaxPool2d", lambda: nn.Conv2d(3, 4, 3), lambda: nn.BatchNorm2d(4), nn.ReLU, lambda: nn.MaxPool2d(2)
    ),
    image(
        "Conv2d, GroupNorm, AvgPool2d", lambda: nn.Conv2d(3, 4, 3), lambda: nn.GroupNorm(2, 4), nn.SiLU, lambda: nn.AvgPool2d(2)
    ),
    image(
        "ConvTranspose2d, InstanceNorm2d",
        lambda: nn.ConvTranspose2d(3, 4, 3, 2),
        lambda: nn.InstanceNorm2d(4, affine=True),
        nn.ELU,
    ),
    image(
        "Conv2d, LocalResponseNorm, LPPool2d",
        lambda: nn.Conv2d(3, 4, 3),
        lambda: nn.LocalResponseNorm(2),
        lambda: nn.LPPool2d(2, 2),
    ),
    image(
        "Conv2d, PixelShuffle, Upsample",
        lambda: nn.Conv2d(3, 4, 3),
        lambda: nn.PixelShuffle(2),
        lambda: nn.Upsample(scale_factor=2),
    ),
    image(
        "Unfold, Linear, Fold",
        lambda: nn.Unfold(2, stride=2),
        lambda: nn.Linear(16, 16),
        nn.Tanh,
        lambda: nn.Fold((8, 8), 2, stride=2),
    ),
    image("spectral_norm(Conv2d)", lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)), nn.Tanh),
    image("weight_norm(Conv2d)", lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.Tanh),
    image("orthogonal(Linear)", lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), nn.Tanh),
    case("nn.Bilinear", lambda: nn.Bilinear(4, 4, 3), lambda model: model(draw(2, 4), draw(2, 4, seed=1))),
    case(
        "nn.EmbeddingBag", lambda: nn.EmbeddingBag(9, 4, mode="mean"), lambda model: model(torch.tensor([[1, 2, 4], [4, 3, 8]]))
    ),
    Case(
        "torch",
        "nn.AdaptiveLogSoftmaxWithLoss",
        lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 10, [4, 7], div_value=2.0),
        lambda model: model(draw(3, 8), torch.tensor([1, 5, 9])).loss,
    ),
]
