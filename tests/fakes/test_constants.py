"""Constants that tests of whole daemons set: each exists, applies and is as before afterwards."""

from collections.abc import Mapping

import pytest

from reconciler.config.model import Config, KubeletSection
from reconciler.runtime import standby
from tests.cluster import test_shortage
from tests.e2e import test_core_sched, test_harm, test_idle_threads
from tests.fakes.constants import applied
from tests.node import disturbance, memoryscene


@pytest.mark.parametrize(
    "constants",
    [
        disturbance.CONSTANTS,
        memoryscene.SOON,
        test_shortage.SOON,
        test_core_sched.SOON,
        test_harm.FAST,
        test_idle_threads.SOON,
    ],
)
def test_the_constants_of_tests_that_run_seldom_exist(constants: Mapping[str, object]) -> None:
    with applied(constants):
        pass


def test_a_constant_applies_within_and_is_as_before_afterwards() -> None:
    module = f"{standby.__name__}:_YIELDS_S"
    with applied({"kubelet.timeout_s": 9.0, "eviction.means.restarts.watch_s": 0.5, module: 1.0}):
        assert standby._YIELDS_S == 1.0
        assert (KubeletSection().timeout_s, Config().eviction.means.restarts.watch_s) == (9.0, 0.5)
        assert Config().eviction.means.restarts.times == 3
    assert (KubeletSection().timeout_s, Config().eviction.means.restarts.watch_s) == (3.0, 15.0)
    assert standby._YIELDS_S > 1.0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("node.sample_s", "is a setting"),
        ("kubelet.nothing", "there is no constant"),
        ("reconciler.runtime.standby:_NOTHING", "there is no constant"),
    ],
)
def test_what_is_no_constant_is_refused(path: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message), applied({path: 1.0}):
        pass
