"""Linear maps by oneDNN: the model's own results and gradients; others are left."""

import pytest
import torch

from antiphon.cpu.layers import linear, quicken_linears


@pytest.mark.parametrize("shape", [(7,), (1, 5), (2, 3, 4), (1, 1)])
def test_results_and_gradients_are_those_of_torch(shape: tuple[int, ...]) -> None:
    torch.manual_seed(len(shape))
    values = torch.randn(*shape, 48, requires_grad=True)
    weight = torch.randn(24, 48, requires_grad=True)
    above = torch.randn(*shape, 24)
    found, expected = linear(values, weight), values @ weight.T
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    ours, theirs = (torch.autograd.grad((made * above).sum(), [values, weight]) for made in (found, expected))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_the_same_product_has_the_same_bits_wherever_it_lies_in_memory() -> None:
    torch.manual_seed(0)
    values, weight, room = torch.randn(65, 48), torch.randn(24, 48), torch.empty(65 * 48 + 1)
    elsewhere = room[1:].view(65, 48).copy_(values)
    assert torch.equal(linear(values, weight), linear(elsewhere, weight))


def test_maps_with_a_bias_or_of_another_type_are_left() -> None:
    def layers(bias: bool) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=bias))

    assert quicken_linears(layers(bias=True)) == 1
    assert quicken_linears(layers(bias=False)) == 2
    assert quicken_linears(layers(bias=False).bfloat16()) == 0
