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
    hold_person_s: Annotated[
        float,
        Meta(
            ge=0,
            le=604800,
            description="duration of a hold on a value set manually, and after restore --pod",
        ),
    ] = 3600.0

    # Systemd writes all values of a unit again at daemon-reload and when the kubelet changes one: corrected
    # at once and not counted.
    systemd_per_minute: ClassVar[int] = 60
    # Two kubelet syncs and their retries.
    window_s: ClassVar[float] = 120.0
    # Doubles with each further one, so that two programs do not write in turns without end.
    backoff_s: ClassVar[float] = 1.0
    # Bounds the time for which a value of another program is in force.
    backoff_max_s: ClassVar[float] = 30.0
    # The other program was stopped or reconfigured by then, or the alert has been read.
    retry_yielded_s: ClassVar[float] = 3600.0
