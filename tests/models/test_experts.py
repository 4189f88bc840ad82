"""Pieces: a file's tensors are views of the fused ones, which they fill, each element once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from antiphon.models.experts import pieces_in_files

SHAPES = {
    "layers.0.mlp.experts.gate_up_proj": (3, 8, 5),
    "layers.0.mlp.experts.down_proj": (3, 5, 4),
    "layers.0.mlp.gate.weight": (3, 5),
    "norm.weight": (5,),
}


@given(experts=st.integers(1, 5), inner=st.integers(1, 6), width=st.integers(1, 6))
def test_pieces_fill_each_fused_tensor_without_a_copy(experts: int, inner: int, width: int) -> None:
    shapes = {
        "mlp.experts.gate_up_proj": (experts, 2 * inner, width),
        "mlp.experts.down_proj": (experts, width, inner),
    }
    held = {name: np.zeros(shape, np.int64) for name, shape in shapes.items()}
    pieces = pieces_in_files(shapes)
    assert len(pieces) == 3 * experts and {piece.experts for piece in pieces.values()} == {"mlp.experts"}
    for piece in pieces.values():
        view = piece.of(held[piece.tensor])
        assert view.shape == piece.shape and view.base is held[piece.tensor]
        assert not view.any()
        view[...] = piece.offset + 1 + np.arange(view.size).reshape(piece.shape)
    for tensor in held.values():
        assert tensor.flatten().tolist() == list(range(1, tensor.size + 1))


def test_an_expert_has_gate_above_up() -> None:
    fused = np.arange(3 * 8 * 5).reshape(3, 8, 5)
    pieces = pieces_in_files(SHAPES)
    for place, kind in enumerate(("gate", "up")):
        piece = pieces[f"layers.0.mlp.experts.2.{kind}_proj.weight"]
        assert np.array_equal(piece.of(fused), fused[2, 4 * place : 4 * place + 4])


def test_a_tensor_is_taken_apart_only_where_the_files_have_its_parts() -> None:
    part = "layers.0.mlp.experts.0.down_proj.weight"
    for have, apart in (
        ([*SHAPES], set()),
        (["experts.w1"], set()),
        ([part], {"layers.0.mlp.experts.down_proj"}),
        ([part, *SHAPES], set()),
    ):
        found = pieces_in_files(SHAPES, have)
        assert {piece.tensor for name, piece in found.items() if piece.rows is not None} == apart
        assert {piece.tensor for piece in found.values()} == SHAPES.keys()
    others = {"mlp.experts.gate_up_proj": (6, 4), "mlp.gate_up_proj": (2, 6, 4)}
    assert pieces_in_files(others).keys() == others.keys()
