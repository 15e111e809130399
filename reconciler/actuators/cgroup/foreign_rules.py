"""The configuration of `reconciler.actuators.cgroup.conflict`; its import loads no actuator."""

from typing import Annotated, ClassVar

from msgspec import Meta, Struct


class ForeignRules(Struct, frozen=True, kw_only=True):
    """Bounds for reasserting a value against foreign writes."""

    rounds: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="foreign writes of a file within window_s after which bypassd gives it up",
        ),
    ] = 5
    window_s: Annotated[float, Meta(ge=1, le=86400, description="time window in which foreign writes are counted")] = (
        120.0
    )
    backoff_s: Annotated[
        float, Meta(ge=0.01, le=3600, description="wait before the second reassertion; doubles with each further one")
    ] = 1.0
    backoff_max_s: Annotated[float, Meta(ge=0.01, le=3600, description="longest wait between two reassertions")] = 30.0
    retry_yielded_s: Annotated[
        float, Meta(ge=1, le=604800, description="time after which bypassd tries a given-up file again")
    ] = 3600.0
    hold_person_s: Annotated[
        float,
        Meta(
            ge=0,
            le=604800,
            description="duration of a hold on a value set manually, and after restore --pod",
        ),
    ] = 3600.0

    # Constants: no two nodes need them to differ.
    # Systemd writes all values of a unit again at daemon-reload and when the kubelet changes one: corrected
    # at once and not counted.
    systemd_per_minute: ClassVar[int] = 60
