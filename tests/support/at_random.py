"""Random cases by hypothesis: the same ones for the same seed, none kept on disk."""

from collections.abc import Callable

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from hypothesis.strategies import SearchStrategy

# No deadline: a busy machine is no failure.
ANY = settings(
    deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck)
)


def check_at_random(
    check: Callable[..., None], number: int, cases: int, /, **drawn: SearchStrategy
) -> None:
    """Call ``check`` for ``cases`` draws of its arguments, which the seed ``number`` chooses."""

    def run(**arguments: object) -> None:
        check(**arguments)

    seed(number)(settings(ANY, max_examples=cases)(given(**drawn)(run)))()


def use_at_random(
    machine: type[RuleBasedStateMachine], number: int, cases: int, steps: int, **more: object
) -> None:
    """Run ``cases`` sequences of at most ``steps`` of the machine's rules."""
    # A class of its own: the seed is kept on it.
    seeded = seed(number)(type(machine.__name__, (machine,), {}))
    wanted = settings(ANY, max_examples=cases, stateful_step_count=steps, **more)
    run_state_machine_as_test(seeded, settings=wanted)
