"""Every error that rung raises on purpose.

One root, two branches: `UserError` for what a user of the library can mend, `InternalError` for a broken invariant of ours. A message
says what was expected, what came and where; `hint` says what to do and is printed as the last line.
"""

from __future__ import annotations

from collections.abc import Sequence


class RungError(Exception):
    """Root of all errors raised by rung. `hint` is a thing to do, or empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message}\nhint: {hint}" if hint else message)


class UserError(RungError):
    """Something that came from outside is not acceptable."""


class InternalError(RungError):
    """An invariant of rung does not hold; please report it."""


# --- configuration and context -------------------------------------------------------------------------------------------------------


class ConfigError(UserError, ValueError):
    """A configuration value is out of its range or contradicts another."""


class UnsupportedVersionError(UserError, ImportError):
    """Python or torch is older than what rung is for."""


class ContextError(UserError, RuntimeError):
    """An operation needs a forward context and none is set."""


# --- compile -------------------------------------------------------------------------------------------------------------------------


class TraceError(UserError):
    """The module could not be traced as one graph."""


class DynamicShapeError(TraceError):
    """A dimension declared dynamic was fixed, or a branch depends on it."""


class UnsupportedModuleError(UserError):
    """The module does something that a compiled graph cannot express."""


class LazyStateError(UnsupportedModuleError):
    """forward keeps something that was not there before, as code does that makes a table at its first call. `names` are the dotted
    paths."""

    def __init__(self, message: str, *, hint: str = "", names: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.names = names


class InputMismatchError(UserError, TypeError):
    """The arguments of a call do not fit the ones that were traced."""


class FakeKernelError(UserError, RuntimeError):
    """An op returns something else than its fake kernel said while it was traced."""


class OutputMismatchError(UserError, RuntimeError):
    """A function that runs eagerly between pieces returned something else than it did when the plan was made."""


class GuardError(UserError, RuntimeError):
    """Something that a trace has read was changed after it and the policy is to raise, or during the compile."""


class CompileError(UserError):
    """Inductor refused or failed to compile a piece."""


# --- passes --------------------------------------------------------------------------------------------------------------------------


class PassError(UserError, ValueError):
    """A pass cannot be used: it is not found, has no identity, or changes what a graph computes."""


class PatternError(PassError):
    """A pattern cannot be registered: its parts contradict each other, or its replacement computes something else."""


# --- cache ---------------------------------------------------------------------------------------------------------------------------


class CacheError(UserError):
    """The artifact store cannot be used."""


class ArtifactError(CacheError):
    """An artifact is damaged or does not fit this process."""


class UntrustedStoreError(CacheError):
    """A store belongs to another user, or everybody may write it; nothing of it was read."""


class CacheMissError(CacheError):
    """A compile was needed, and a hit in the store was required. The message says what differs from the nearest entry."""


class BundleError(CacheError):
    """A bundle cannot be written, or is not one, or holds what a bundle must not."""


# --- launch --------------------------------------------------------------------------------------------------------------------------


class LaunchError(UserError, RuntimeError):
    """The driver refused to load or launch a kernel. `code` is the driver's error number, 0 where the refusal is ours."""

    def __init__(self, message: str, *, hint: str = "", code: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class KernelArgumentError(UserError, TypeError):
    """The arguments of a launch do not fit the kernel's parameters: their number, a dtype, a value or a device."""


class KernelExportError(UserError):
    """A kernel of another compiler cannot be turned into a `KernelImage`."""


# --- graphs --------------------------------------------------------------------------------------------------------------------------


class LadderError(UserError, ValueError):
    """A list of capture sizes is not acceptable."""


class TraceFileError(UserError, ValueError):
    """A step trace cannot be read, or a line of it is not one of the format."""


class CaptureError(UserError):
    """A graph could not be captured. `size` is the number of rows of the capture, `piece` the step of the plan, where they are known."""

    def __init__(self, message: str, *, hint: str = "", size: int | None = None, piece: str = "") -> None:
        super().__init__(message, hint=hint)
        self.size = size
        self.piece = piece


class PaddingError(UserError):
    """Rows of a padded dimension influence each other."""


class StaleOutputError(UserError):
    """A borrowed output was read after the next replay overwrote it."""


class HostReadError(CaptureError):
    """Code inside a capture reads values of the device on the host, or waits for it."""


class HostCopyError(CaptureError):
    """Code inside a capture copies from host memory, whose address and contents a replay would read at another time."""


class StreamError(CaptureError):
    """Code inside a capture works on a stream that is not part of it, or on one that does not rejoin."""


class GeneratorError(CaptureError):
    """Code inside a capture draws random numbers from a generator that replays would not advance."""


class AddressChangedError(UserError):
    """Tensors that a captured graph reads lie elsewhere now. `names` are those that moved."""

    def __init__(self, message: str, *, hint: str = "", names: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.names = tuple(names)


class ForkedProcessError(UserError, RuntimeError):
    """Graphs were used in a forked child of the process that captured them."""


class BackendUnavailableError(UserError):
    """The named backend cannot run here; the reason is in the message."""


# --- models --------------------------------------------------------------------------------------------------------------------------


class ModelLoadError(UserError):
    """A model folder or file cannot be read."""


class UnknownModelError(ModelLoadError):
    """No architecture of this name, or no model at this place."""


class MissingWeightError(ModelLoadError):
    """A parameter has no tensor in the checkpoint, or one of another shape."""


class UnexpectedWeightError(ModelLoadError):
    """The checkpoint holds a tensor that belongs to no parameter."""


class TokenizerError(ModelLoadError):
    """A tokenizer or chat template is missing, not supported, or refuses its input."""


# --- runner --------------------------------------------------------------------------------------------------------------------------


class StateError(UserError, RuntimeError):
    """A call of the runner came out of order."""


class StepFailedError(UserError, RuntimeError):
    """A plan was applied and its step failed; the requests of the plan cannot go on, others can. The cause is chained."""


class RequestError(UserError, ValueError):
    """A request is not acceptable; other requests are unharmed."""


class PromptTooLongError(RequestError):
    """The prompt does not fit the context."""


class GrammarMatchError(UserError, RuntimeError):
    """The grammar of a request failed. `request_id` names the request; the cause is chained."""

    def __init__(self, message: str, *, hint: str = "", request_id: str = "") -> None:
        super().__init__(message, hint=hint)
        self.request_id = request_id


class SamplingParamsError(RequestError):
    """A sampling parameter is out of its range."""


class GrammarError(UserError, ValueError):
    """A grammar cannot be compiled."""


class KVCacheTooSmallError(UserError):
    """The KV cache cannot hold one request of the maximum length."""


class BlockTableError(UserError, RuntimeError):
    """A plan gives a request more blocks than its row holds, fewer than its tokens need, or blocks that it cannot have."""
