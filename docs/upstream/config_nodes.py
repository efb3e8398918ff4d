"""TorchRL's Hydra nodes of the losses, written from their signatures."""

from __future__ import annotations

import re
from inspect import Parameter, signature

from edits import Edit

from minerva_torchrl import MPOLoss, VMPOLoss

CONFIGS = "torchrl/trainers/algorithms/configs"
_EXPRESSIBLE = re.compile(r"(int|float|str|bool)( \| None)?")

_ESTIMATORS = {
    "mpo": ("td0", 'as TorchRL\'s estimators are, or ``"retrace"``'),
    "vmpo": ("gae", "as TorchRL's estimators are"),
}


def node(kind: type, name: str) -> str:
    """A dataclass with every argument of the loss, and the function that makes it."""
    fields = []
    for argument in signature(kind).parameters.values():
        if argument.kind is Parameter.VAR_KEYWORD:
            continue
        written = str(getattr(argument.annotation, "__name__", argument.annotation))
        written = written if _EXPRESSIBLE.fullmatch(written) else "Any"
        value = None if argument.default is Parameter.empty else argument.default
        shown = f'"{value}"' if isinstance(value, str) else repr(value)
        fields.append(f"    {argument.name}: {written if value is not None else 'Any'} = {shown}")
    estimator, kinds = _ESTIMATORS[name]
    made = f"_make_{name}_loss"
    return f'''\
@dataclass
class {kind.__name__}Config(LossConfig):
    """Hydra configuration for :class:`~torchrl.objectives.{kind.__name__}`.

    Every kwarg of ``{kind.__name__}.__init__`` is a field. Three more make its value
    estimator: ``value_estimator`` ({kinds}),
    ``gamma`` and ``lmbda``.
    """

{chr(10).join(fields)}
    value_estimator: str = "{estimator}"
    gamma: float = 0.99
    lmbda: float = 0.95
    _target_: str = "torchrl.trainers.algorithms.configs.objectives.{made}"

    def __post_init__(self) -> None:
        """Post-initialization hook for {kind.__name__} configurations."""
        super().__post_init__()


def {made}(*args, **kwargs) -> {kind.__name__}:
    value_estimator = kwargs.pop("value_estimator")
    hyperparameters = {{"gamma": kwargs.pop("gamma"), "lmbda": kwargs.pop("lmbda")}}
    if value_estimator in ("td0", "td1"):
        hyperparameters.pop("lmbda")
    loss = {kind.__name__}(*args, **kwargs)
    return loss.make_value_estimator(value_estimator, **hyperparameters)


'''


def mpo_edits() -> tuple[Edit, ...]:
    """What ``MPOLoss`` adds to TorchRL's configs."""
    return (
        Edit(f"{CONFIGS}/objectives.py", "    KLPENPPOLoss,\n", "    MPOLoss,\n"),
        *_edits(MPOLoss, "mpo", after="LossConfig"),
    )


def vmpo_edits() -> tuple[Edit, ...]:
    """What ``VMPOLoss`` adds to TorchRL's configs."""
    return (
        Edit(f"{CONFIGS}/objectives.py", "    TD3Loss,\n", "    VMPOLoss,\n"),
        *_edits(VMPOLoss, "vmpo", after="TQCLossConfig"),
    )


def _edits(kind: type, name: str, after: str) -> tuple[Edit, ...]:
    config = f"{kind.__name__}Config"
    stored = f'    cs.store(group="loss", name="{name}", node={config})\n'
    sac = '    cs.store(group="loss", name="sac", node=SACLossConfig)\n'
    page = "docs/source/reference/config.rst"
    return (
        Edit(
            f"{CONFIGS}/objectives.py",
            "@dataclass\nclass PPOLossConfig(LossConfig):\n",
            node(kind, name),
            before=True,
        ),
        Edit(f"{CONFIGS}/__init__.py", f"    {after},\n", f"    {config},\n"),
        Edit(f"{CONFIGS}/__init__.py", f'    "{after}",\n', f'    "{config}",\n'),
        Edit(f"{CONFIGS}/__init__.py", sac, stored, before=True),
        Edit(page, "    PPOLossConfig\n", f"    {config}\n", before=True),
    )
