"""Device functions, and what lets numba-cuda compile them without a GPU."""

from contextlib import contextmanager
from types import SimpleNamespace

from numba import config, cuda

# Functions that do what PTX says, under numba's simulator. tests/simulator sets `instruction`,
# `shared_address` and `products` before ptx.py and warpgroup.py are imported.
stand_ins = SimpleNamespace()

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

        numba then types it once in a process. So a variable that a function closes over must be set
        before the function is made, and a constant of a module must never be set again.
        """
        try:
            values = tuple(cell.cell_contents for cell in function.__closure__ or ())
            key = _key_of((values, function.__defaults__, function.__kwdefaults__))
        except (TypeError, ValueError):  # a value that may change, or is not set yet
            return _compiled_when_called(function)
        # by its address the dictionary of globals, which the function that was made keeps
        key = id(function.__globals__), function.__code__, key
        if key not in _made:
            _made[key] = _compiled_when_called(function)
        return _made[key]

    def _key_of(value):
        """What is equal for the same values only, although 1 == True == 1.0; or a TypeError."""
        kind = type(value)
        if kind is tuple:
            return tuple(map(_key_of, value))
        if kind is float:
            return kind, repr(value)
        if kind in (bool, int, str) or kind.__hash__ is object.__hash__:
            return kind, value  # the last are equal to themselves only: other device functions
        raise TypeError(f"a function of a kernel closes over {kind}")


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
    """Answer numba-cuda, which asks the current device what to compile device functions for."""
    from numba.cuda import dispatcher  # the simulator has none

    asked = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = asked
