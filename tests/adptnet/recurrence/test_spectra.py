"""Spectra and gains, compared with their formulas."""

import math

import pytest
import torch
from torch.testing import assert_close

from adptnet import drive, spectra
from support import brute
from support.members import all_spectra, make_even


def test_linspace_spaces_the_logarithm_of_the_step():
    lambda_bar = spectra.Linspace(dt_min=1e-4, dt_max=1e-1, decay=0.5).build(7)().real
    dt = [10 ** (-4 + 3 * i / 6) for i in range(7)]
    assert_close(lambda_bar, torch.tensor([math.exp(-0.5 * d) for d in dt]))


def test_s4d_real_counts_its_rates_and_draws_its_steps():
    built = spectra.S4DReal(dt_min=1e-3, dt_max=1e-1).build(64)
    assert_close(built.log_decay.exp(), torch.arange(1.0, 65.0))
    steps = built.log_dt.exp()
    assert 1e-3 <= steps.min() < 4e-3
    assert 3e-2 < steps.max() <= 1e-1
    expanded = spectra.S4DReal().build(12, expansion=4)
    assert_close(expanded.log_decay.exp(), torch.arange(1.0, 5.0).repeat(3))
    assert expanded.log_dt.shape == (3,)
    ratio = expanded().real.log() / torch.arange(1.0, 5.0).repeat(3)
    assert_close(ratio, ratio[::4].repeat_interleave(4))  # one step size per channel


def test_s4d_inv_has_the_published_frequencies():
    built = spectra.S4DInv(dt_min=1e-3, dt_max=1e-1).build(64)
    assert_close(built.log_frequency.exp(), torch.tensor(brute.s4d_inv_frequencies(64)))
    assert abs(float(built.log_frequency.detach().exp().min()) - 0.3234) < 1e-3
    eigenvalues = built().eigenvalues()
    assert eigenvalues.shape == (32,)
    assert_close(eigenvalues.abs(), torch.exp(-0.5 * built.log_dt.exp()))
    assert_close(built().modulus()[::2], eigenvalues.abs())
    expanded = spectra.S4DInv().build(24, expansion=8)
    assert_close(expanded.log_frequency.exp(), torch.tensor(brute.s4d_inv_frequencies(8)).repeat(3))


def test_a_block_is_multiplication_by_a_complex_number():
    blocks = spectra.S4DInv().build(6)()
    x = torch.randn(4, 6)
    product = torch.view_as_complex(x.unflatten(-1, (3, 2)).contiguous()) * blocks.eigenvalues()
    assert_close(blocks.mv(x), torch.view_as_real(product).flatten(-2))
    assert_close(blocks.dense(), brute.blocks(blocks.eigenvalues()))
    assert_close(blocks.transpose().dense(), blocks.dense().mT)


@pytest.mark.parametrize("spectrum", all_spectra, ids=repr)
@pytest.mark.parametrize("size", [6, 13])
def test_every_spectrum_is_its_formula(spectrum, size):
    size = make_even(size, spectrum)
    built = spectrum.build(size)
    expected = brute.eigenvalues(spectrum, built)
    assert_close(built().eigenvalues(), expected)
    pair = 2 if spectrum.is_complex else 1
    assert_close(built.log_modulus(), expected.abs().log().repeat_interleave(pair))
    assert_close(built.zero_order_hold().dense(), brute.blocks(brute.hold(spectrum, built)))
    assert (built().modulus() < 1).all()


@pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (0.25, 4), (0.5, 8), (1 / 3, 5), (0.75, 12), (1.0, 16)])
def test_negative_negates_the_given_fraction(fraction, count):
    built = spectra.Negative(spectra.Linspace(), fraction).build(16)
    assert int((built().real < 0).sum()) == count
    assert_close(built().modulus(), built.spectrum().real)
    pairs = spectra.Negative(spectra.S4DInv(), fraction).build(32)
    assert int((pairs().eigenvalues() / pairs.spectrum().eigenvalues()).real.round().eq(-1).sum()) == count


def test_half_negative_alternates():
    assert (spectra.Negative().build(8)().real > 0).tolist() == [True, False] * 4


@pytest.mark.parametrize("inner", [spectra.Linspace(), spectra.S4DInv()], ids=repr)
def test_sparse_sets_the_given_fraction_to_zero_for_good(inner):
    built = spectra.Sparse(inner, 0.75, seed=5).build(32)
    silent = built().modulus() == 0
    assert int(silent.sum()) == 24
    assert torch.equal(silent, spectra.Sparse(inner, 0.75, seed=5).build(32)().modulus() == 0)
    assert not torch.equal(silent, spectra.Sparse(inner, 0.75, seed=6).build(32)().modulus() == 0)
    built().real.sum().backward()
    assert all(p.grad.isfinite().all() for p in built.parameters())
    half = spectra.Negative(spectra.Sparse(inner, 0.75, seed=5), 0.5).build(32)
    signs = half().eigenvalues() / half.spectrum.spectrum().eigenvalues()
    assert sorted(signs.real.round().tolist()) == sorted(
        [0.0] * (24 // (32 // len(signs))) + [-1.0, 1.0] * (len(signs) // 8)
    )


def test_one_eigenvalue_always_stays():
    assert int((spectra.Sparse(spectra.Linspace(), 0.99).build(4)().real != 0).sum()) == 1


def test_gains_are_accurate_for_eigenvalues_close_to_one():
    slow = spectra.Linspace(dt_min=1e-9, dt_max=1e-9, decay=1.0)
    single = slow.build(3, dtype=torch.float32)
    assert_close(drive.EMA().evaluate(single).real.double(), torch.full((3,), 1e-9), rtol=1e-5, atol=0)
    assert_close(drive.LRU().evaluate(single).real.double(), torch.full((3,), math.sqrt(2e-9)), rtol=1e-5, atol=0)
    assert_close(drive.ZOH().evaluate(single).real.double(), torch.full((3,), 1e-9), rtol=1e-5, atol=0)


def test_a_frozen_spectrum_has_no_trainable_parameters():
    built = spectra.Linspace(trainable=False).build(4)
    assert not any(p.requires_grad for p in built.parameters())
    assert set(built.state_dict()) == {"log_decay", "log_dt"}


def test_building_again_with_the_same_seed_gives_the_same_numbers():
    torch.manual_seed(3)
    first = spectra.S4DReal().build(5)
    torch.manual_seed(3)
    assert torch.equal(first().real, spectra.S4DReal().build(5)().real)
