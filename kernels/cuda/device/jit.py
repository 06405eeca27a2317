"""Device functions, and what lets numba-cuda compile them without a GPU."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
from numba import config, cuda

if config.ENABLE_CUDASIM:

    def device_function(function):
        """simulator.launch swaps what numba's simulator would at each call of each function."""
        return function
else:
    # LLVM inlines them. numba's own inline="always" copies its IR at each level: 7 times slower.
    # opt and debug are given, so that no setting of numba's changes the machine code.
    _compiled_when_called = cuda.jit(device=True, forceinline=True, opt=True, debug=False)
    _made: dict[object, object] = {}

    def device_function(function):
        """Make a device function, or give back the one that was made before of the same code.

        Kernels share most of their functions: the code is the same, and it closes over the same
        values. numba types such a function once in a process. Kernels after the first compile in
        half the time or less.
        """
        try:
            values = tuple(cell.cell_contents for cell in function.__closure__ or ())
            key = function.__module__, function.__code__, _key_of((values, function.__defaults__))
            hash(key)
        except (TypeError, ValueError):  # a value that may change, or is not set yet
            return _compiled_when_called(function)
        if key not in _made:
            _made[key] = _compiled_when_called(function)
        return _made[key]


def _key_of(value):
    """A key that only the same constants share. In Python 1 == True == 1.0, and 0.0 == -0.0."""
    if isinstance(value, tuple):
        return tuple(map(_key_of, value))
    is_float = isinstance(value, (float, np.floating))
    return type(value), str(value) if is_float else value


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
