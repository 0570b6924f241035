"""What the endpoints share: settings, the dispatcher, the metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ringserve.config import FrontendSettings
from ringserve.frontend.dispatcher import Dispatcher
from ringserve.frontend.generation import StreamSettings
from ringserve.frontend.metrics import Metrics
from ringserve.frontend.validation import Limits


@dataclass(frozen=True)
class Service:
    """One frontend's HTTP service."""

    settings: FrontendSettings
    dispatcher: Dispatcher
    metrics: Metrics
    stream_settings: StreamSettings
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.settings.model_name

    @property
    def max_body_size(self) -> int:
        return self.settings.config.max_body_size

    def limits(self) -> Limits:
        """Raises 503 while the model loads and while the server stops."""
        config = self.settings.config
        return Limits(
            model_name=self.model_name,
            ready=self.dispatcher.require_ready(),
            max_logprobs=config.max_logprobs,
            max_n=config.max_n,
            max_choices=self.dispatcher.max_choices,
        )
