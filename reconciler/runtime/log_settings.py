"""What of the log can be set. Apart from `reconciler.runtime.logs`, as the configuration needs no logging library."""

from enum import StrEnum


class LogLevel(StrEnum):
    """The least that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"
