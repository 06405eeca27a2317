"""Device functions, and what lets numba-cuda compile them without a GPU."""

from contextlib import contextmanager
from types import SimpleNamespace

from numba import config, cuda

if config.ENABLE_CUDASIM:

    def device_function(function):
        """simulator.launch swaps what numba's simulator would at each call of each function."""
        return function
else:
    # LLVM inlines them. numba's own inline="always" copies its IR at each level: 7 times slower.
    # opt and debug are given, so that no setting of numba's changes the machine code.
    device_function = cuda.jit(device=True, forceinline=True, opt=True, debug=False)


def in_turn(functions):
    """One function that calls several with its arguments: a loop so long would not be unrolled."""
    function = functions[0]
    for following in functions[1:]:
        function = _then(function, following)
    return function


def _then(first, second):
    @device_function
    def both(*arguments):
        first(*arguments)
        second(*arguments)

    return both


@contextmanager
def pretend(capability):
    """numba-cuda asks the current device for what device functions are compiled for, even when the
    kernel is compiled for another one, or there is none."""
    from numba.cuda import dispatcher  # the simulator has none

    asked = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = asked
