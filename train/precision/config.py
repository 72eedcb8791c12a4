"""The `precision` section of the configuration: which numbers are kept and computed in which type. Imports no torch."""

from dataclasses import dataclass, fields
from enum import StrEnum

from contract.errors import ConfigError

BLOCK = 256
"""Values of a moment that share a scale."""
SCALE_BYTES = 4
"""Of the scale, in fp32, of a row or a block of values in one byte each."""


class Compute(StrEnum):
    """A type of numbers that products are computed in, by torch's name."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Sum(StrEnum):
    """A type of numbers that gradients add up in, by torch's name."""

    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"

    @property
    def bytes(self) -> int:
        """Of one value."""
        return {Sum.bfloat16: 2, Sum.float32: 4, Sum.float64: 8}[self]


class Moments(StrEnum):
    """How the moments of Adam are kept."""

    float32 = "float32"
    int8 = "int8"
    """One byte a value and a scale for each block of them, see `train.optim.blocks`."""

    def bytes(self, size: int) -> int:
        """Of both moments of a matrix with `size` values."""
        return 2 * (size + SCALE_BYTES * -(-size // BLOCK)) if self is Moments.int8 else 8 * size


class Table(StrEnum):
    """How the embedding is kept, where not as the other weights."""

    int8 = "int8"
    """One byte a value and a scale for each row, see `train.precision.rows`."""

    @staticmethod
    def bytes(elements: int, columns: int) -> int:
        """Of whole rows."""
        return elements // columns * (columns + SCALE_BYTES)


LEAST_SCALE, LARGEST_SCALE = 2.0**-14, 2.0**24
"""Of a loss: beyond them the squares of gradients in fp32 would be what overflows, or nothing."""
SCALING = (
    "loss_scale",
    "loss_scale_growth_steps",
    "loss_scale_hysteresis",
    "loss_scale_min",
    "loss_scale_patience",
)


@dataclass
class PrecisionConfig:
    """Mixed precision: the type of each role."""

    name: str = "bf16"
    compute: Compute = Compute.bfloat16
    """Of matrix products."""
    backward: Compute | None = None
    """Of the matrix products of the backward pass; null: as `compute`."""
    parameters: Compute | None = None
    """Of weights on their device between steps; the optimizer then keeps fp32 weights of its own. Null: float32, and
    that of `compute` with offload.optimizer."""
    accumulate: Sum = Sum.float32
    """In which the gradients of micro-batches add up."""
    reduce: Sum = Sum.float32
    """In which gradients travel and add up between ranks."""
    optimizer_state: Moments = Moments.float32
    embedding: Table | None = None
    """int8: one byte a value, no other copy of it anywhere. Null: as the other weights."""
    tf32: bool = False
    """Products of fp32 numbers on a GPU's matrix units, which see 10 of their 23 bits."""
    float8: bool = False
    """Products of the layers in 8 bits on GPUs that can, by torchao; needs it installed."""
    loss_scale: float = 65536.0
    """Where float16 computes the loss is multiplied by this at the start, see `train.precision.scale`."""
    loss_scale_growth_steps: int = 2000
    """Steps without an overflow after which the scale doubles."""
    loss_scale_hysteresis: int = 1
    """Steps with an overflow until the scale halves; counted anew when it has doubled."""
    loss_scale_min: float = 1.0
    """The scale goes no lower."""
    loss_scale_patience: int = 8
    """Overflows in a row at the lowest scale after which the run ends with a diagnosis."""
    dynamic: bool = False
    """`accumulate` and `reduce` give way to bfloat16 while that is harmless, see `train.precision.dynamic`."""
    dynamic_steps: int = 50
    """Steps between two looks at whether it is."""

    @property
    def compute_bytes(self) -> int:
        """Bytes of a value of the type that matrix products are computed in."""
        return 4 if self.compute is Compute.float32 else 2

    @property
    def arriving_bytes(self) -> int:
        """Bytes of a value of a gradient when a backward pass has made it, before it is added to anything."""
        return self.compute_bytes if self.backward in (None, self.compute) else self.accumulate.bytes

    @property
    def scales_loss(self) -> bool:
        """Whether gradients could fall out of the range of float16."""
        return Compute.float16 in (self.compute, self.backward)

    @property
    def sums_apart(self) -> bool:
        """Whether gradients add up in other types than those of plain data parallelism."""
        return self.dynamic or Sum.float32 != self.accumulate or Sum.float32 != self.reduce

    @property
    def needs_policy(self) -> bool:
        """Whether only parts under torch's `fully_shard` or `replicate` can have these types."""
        return self.sums_apart or self.embedding is not None

    @property
    def compact(self) -> bool:
        """Whether the optimizer must take weights, moments or gradients that are not in fp32."""
        return self.needs_policy or self.optimizer_state is Moments.int8

    def validate(self) -> None:
        """Raise `ConfigError` for types that do not go together."""
        if self.parameters not in (None, Compute.float32, self.compute):
            raise ConfigError(
                f"precision.parameters={self.parameters}: choose float32, or {self.compute.value} as precision.compute"
            )
        if self.tf32 and self.compute is not Compute.float32:
            raise ConfigError(
                f"precision.tf32 changes products in fp32, and precision.compute={self.compute.value} has none: leave "
                "it out, or choose precision=tf32"
            )
        if self.float8 and (self.compute is not Compute.bfloat16 or self.backward is not None):
            raise ConfigError(
                "precision.float8 replaces the products of precision.compute=bfloat16, forward and backward: leave "
                "precision.backward out, and set compute=bfloat16"
            )
        if self.dynamic and Sum.bfloat16 == self.accumulate == self.reduce:
            raise ConfigError(
                "precision.dynamic moves between bfloat16 and the types of precision.accumulate and precision.reduce, "
                "which are bfloat16: set them to float32, or leave dynamic out"
            )
        self._validate_scale()
        self._validate_dynamic()

    def _validate_scale(self) -> None:
        if not self.scales_loss and (changed := self._changed(SCALING)):
            raise ConfigError(
                f"precision.{changed}={getattr(self, changed)} does nothing, for no product is computed in float16: "
                "leave it out, or choose precision=fp16"
            )
        if not LEAST_SCALE <= self.loss_scale_min <= self.loss_scale <= LARGEST_SCALE:
            raise ConfigError(
                f"precision.loss_scale={self.loss_scale}: must be from precision.loss_scale_min="
                f"{self.loss_scale_min}, which is at least {LEAST_SCALE:g}, to {LARGEST_SCALE:.0f}"
            )
        for name in ("loss_scale_growth_steps", "loss_scale_hysteresis", "loss_scale_patience"):
            if getattr(self, name) < 1:
                raise ConfigError(f"precision.{name}={getattr(self, name)}: must be at least 1")

    def _validate_dynamic(self) -> None:
        if not self.dynamic and self._changed(("dynamic_steps",)):
            raise ConfigError(
                f"precision.dynamic_steps={self.dynamic_steps} does nothing without precision.dynamic: leave it out"
            )
        if self.dynamic_steps < 2:
            raise ConfigError(
                f"precision.dynamic_steps={self.dynamic_steps}: must be at least 2, a mean has a spread only then"
            )

    def _changed(self, names: tuple[str, ...]) -> str | None:
        """The first of these fields that does not have its default."""
        defaults = {field.name: field.default for field in fields(self)}
        return next((name for name in names if getattr(self, name) != defaults[name]), None)
