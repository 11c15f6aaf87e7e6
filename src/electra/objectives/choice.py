"""The objectives there are. A new one adds its import and its name here; nothing else in the library has to know it."""

from typing import Annotated

from pydantic import Field

from electra.objectives.adversarial import AdversarialSettings
from electra.objectives.electra import ElectraSettings
from electra.objectives.electric import ElectricSettings
from electra.objectives.masked_lm import MaskedLMSettings
from electra.objectives.replaced_span import ReplacedSpanSettings
from electra.objectives.selection import SelectionSettings
from electra.objectives.token_recovery import TokenRecoverySettings

ObjectiveSettings = Annotated[
    ElectraSettings
    | MaskedLMSettings
    | TokenRecoverySettings
    | ElectricSettings
    | AdversarialSettings
    | ReplacedSpanSettings
    | SelectionSettings,
    Field(discriminator="kind"),
]
