"""Rows of the table: layers, as people train them, and what their operations save."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from laws.table import case, program, rand


@case
def mlp():
    return program(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


@case
def linear_of_three_dimensions():
    return program(nn.Linear(8, 8), F.relu, nn.Linear(8, 4, bias=False), args=(rand(2, 3, 8),))


@case(double=True)
def smooth():
    weight = rand(3, 3, dtype=torch.float64)
    return program(
        lambda x: x.sin() @ weight,
        lambda y: y.exp() * y.tanh(),
        lambda z: (z * z).softmax(-1),
        args=(rand(2, 3, dtype=torch.float64),),
        holds=(weight,),
    )


@case
def trailing_matmul():
    return program(nn.Linear(8, 8), torch.sigmoid, nn.Linear(8, 8))


@case
def attention_with_dropout():
    qkv, out = nn.Linear(8, 24), nn.Linear(8, 8)

    def heads(x):
        return [t.view(2, 5, 2, 4).transpose(1, 2) for t in qkv(x).chunk(3, -1)]

    def attend(q_k_v):
        return F.scaled_dot_product_attention(*q_k_v, dropout_p=0.3, is_causal=True)

    return program(
        heads, attend, lambda y: out(y.transpose(1, 2).reshape(2, 5, 8)), args=(rand(2, 5, 8),), holds=(qkv, out)
    )


@case
def fused_attention():
    return program(
        lambda x: (x.sin(), x.cos(), x * 2),
        lambda q_k_v: F.scaled_dot_product_attention(*q_k_v, is_causal=True),
        torch.tanh,
        args=(rand(2, 2, 5, 4),),
    )


@case
def encoder_layer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return program(nn.Linear(8, 8), layer, nn.LayerNorm(8), args=(rand(2, 5, 8),))


@case
def conv_batchnorm():
    return program(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)),
        args=(rand(2, 3, 6, 6),),
    )


@case
def channels_last():
    conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
    x = rand(2, 4, 6, 6, grad=False).to(memory_format=torch.channels_last).requires_grad_()
    return program(conv, torch.tanh, nn.GroupNorm(2, 4), args=(x,))


@case
def norms():
    return program(nn.LayerNorm(8), nn.RMSNorm(8), lambda x: F.normalize(x, dim=-1))


@case
def spectral_norm():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    return program(torch.sin, layer, torch.tanh)


@case
def lstm():
    rnn = nn.LSTM(4, 6, batch_first=True)
    return program(nn.Linear(4, 4), rnn, lambda r: r[0] * r[1][0].sum(), args=(rand(2, 5, 4),))


@case
def dropouts():
    return program(nn.Dropout(0.5), nn.AlphaDropout(0.3), lambda x: x * torch.bernoulli(x.sigmoid()))


@case
def rrelu_last():
    return program(nn.Linear(8, 8), torch.exp, lambda x: F.rrelu(x - 1, training=True))


@case
def embedding_tied_to_the_head():
    table = nn.Embedding(10, 8)
    return program(
        table,
        torch.tanh,
        lambda h: F.cross_entropy(h @ table.weight.t(), torch.arange(6) % 10),
        args=(torch.arange(6),),
        holds=(table,),
    )


@case
def one_module_twice():
    layer = nn.Linear(8, 8)
    return program(layer, torch.tanh, layer)


@case
def frozen_first_layer():
    base = nn.Linear(8, 8).requires_grad_(False)
    down, up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
    return program(base, lambda h: h + up(down(h)), torch.tanh, args=(rand(4, 8, grad=False),), holds=(down, up))


# --- what operations save -------------------------------------------------------------------------------------------


@case
def outputs_saved_by_their_own_operation():
    return program(lambda x: x.softmax(-1).exp(), lambda x: x.tanh().sigmoid(), lambda x: x.log_softmax(-1))


@case
def one_tensor_saved_twice():
    return program(torch.exp, lambda x: (x * x).sin() * (x * x).cos(), lambda x: x.square() + x.pow(3))


@case
def nothing_saved():
    return program(lambda x: x + 1, lambda x: x.flatten() - 2, lambda x: x.sum())


class Twice(torch.autograd.Function):
    """Reads what it saved two times."""

    @staticmethod
    def forward(ctx, x, scale):
        y = x.exp() * scale
        ctx.save_for_backward(x, y)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, grad):
        x, _ = ctx.saved_tensors
        _, y = ctx.saved_tensors
        return grad * (y + x * 0), None


@case
def custom_function():
    return program(torch.sin, lambda x: Twice.apply(x, 2.0), torch.cos)


@case
def multiple_outputs():
    return program(
        lambda x: torch.var_mean(x.exp(), -1, keepdim=True),
        lambda vm: (vm[0].sqrt() * vm[1].sin()).expand(4, 8).cumsum(-1).chunk(2, -1),
        lambda c: c[0] * c[1],
    )


@case
def sorted_and_chosen():
    return program(
        lambda x: x.sin().topk(3, -1),
        lambda r: (r.values.sort(-1).values, r.indices),
        lambda vi: (vi[0].exp(), vi[1], vi[0].max(-1), vi[0].median(-1).values),
    )


@case
def linear_algebra():
    return program(
        lambda x: x @ x.mT + torch.eye(4), torch.linalg.cholesky, lambda c: torch.linalg.solve(c, torch.eye(4))
    )


@case
def gathered_and_scattered():
    index = torch.tensor([[0, 2], [1, 1], [3, 0], [2, 2]])
    return program(
        lambda x: x.exp().gather(1, index),
        lambda y: torch.zeros(4, 5).scatter_add(1, index, y.square()),
        lambda z: torch.where(z > 1, z.log1p(), z.sin())[[0, 2, 2]].logsumexp(-1),
    )


@case
def routed_to_experts():
    router, experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def route(x):
        return x, router(x).softmax(-1)

    def run(x_scores):
        x, scores = x_scores
        weight, choice = scores.max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(experts):
            (rows,) = (choice == i).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(x[rows]).tanh() * weight[rows, None])
        return out

    return program(route, run, torch.exp, args=(rand(6, 8),), holds=(router, experts))


@case
def einsum():
    weight = rand(3, 4, 5)
    return program(
        lambda x: torch.einsum("bi,ijk->bjk", x, weight),
        torch.tanh,
        lambda y: torch.einsum("bjk,bjl->bkl", y, y),
        args=(rand(2, 3),),
        holds=(weight,),
    )


@case
def complex_numbers():
    return program(
        torch.view_as_complex,
        lambda z: torch.fft.fft(z.exp()) * z.conj(),
        lambda z: z.abs() + z.conj().imag,
        args=(rand(4, 5, 2),),
    )


@case
def sparse_matrix():
    matrix = torch.eye(4).to_sparse()
    return program(lambda x: torch.sparse.mm(matrix, x.exp()), torch.tanh, lambda y: torch.sparse.mm(matrix, y))


@case
def dtypes():
    return program(lambda x: x.double().exp(), lambda x: x.bfloat16().sin(), lambda x: x.float().tanh())


@case
def empty_and_scalar():
    return program(
        lambda x: (x[:0].exp(), x.mean().exp()), lambda p: p[0].sum() * p[1].tanh() + p[1].square(), torch.sin
    )
