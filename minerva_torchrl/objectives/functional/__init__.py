"""The equations of MPO and V-MPO as pure functions of tensors.

Every function takes tensors and returns tensors: no state, no TensorDict, no device logic and no
host synchronisation, so that all of them can be compiled, differentiated and run on any device.

Notation: ``N`` sampled actions, ``*B`` any number of state dimensions, ``D`` action dimensions,
``A`` actions that can be enumerated, ``eta`` a temperature, ``epsilon`` a bound on a
Kullback-Leibler divergence.
"""

from minerva_torchrl.objectives.functional.e_step import (
    categorical_mpo_weights_and_temperature_loss,
    effective_sample_size,
    mpo_weights_and_temperature_loss,
    out_of_bounds_cost,
    sample_kl,
    sample_kl_to_uniform,
    solve_temperature,
    top_k_mask,
    vmpo_weights_and_temperature_loss,
    weight_entropy,
)
from minerva_torchrl.objectives.functional.m_step import (
    GaussianMoments,
    categorical_kl,
    decoupled_gaussian_kl,
    gaussian_entropy,
    lagrangian_losses,
    multivariate_gaussian_kl,
    weighted_gaussian_cross_entropy,
    weighted_moments,
    weighted_multivariate_gaussian_cross_entropy,
    weighted_multivariate_moments,
)
from minerva_torchrl.objectives.functional.value_distributions import (
    categorical_projection,
    gaussian_mixture_nll,
    hl_gauss,
    quantile_huber_loss,
    symexp,
    symlog,
    two_hot,
    weighted_quantile_huber_loss,
)
from minerva_torchrl.objectives.reductions import masked_mean

__all__ = [
    "GaussianMoments",
    "categorical_kl",
    "categorical_mpo_weights_and_temperature_loss",
    "categorical_projection",
    "decoupled_gaussian_kl",
    "effective_sample_size",
    "gaussian_entropy",
    "gaussian_mixture_nll",
    "hl_gauss",
    "lagrangian_losses",
    "masked_mean",
    "mpo_weights_and_temperature_loss",
    "multivariate_gaussian_kl",
    "out_of_bounds_cost",
    "quantile_huber_loss",
    "sample_kl",
    "sample_kl_to_uniform",
    "solve_temperature",
    "symexp",
    "symlog",
    "top_k_mask",
    "two_hot",
    "vmpo_weights_and_temperature_loss",
    "weight_entropy",
    "weighted_gaussian_cross_entropy",
    "weighted_moments",
    "weighted_multivariate_gaussian_cross_entropy",
    "weighted_multivariate_moments",
    "weighted_quantile_huber_loss",
]
