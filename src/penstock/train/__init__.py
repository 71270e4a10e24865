"""Models through schedules. The trainer is to come; today: a trial of any schedule with a small model."""

from penstock.train.trial import Trial, trial

__all__ = ["Trial", "trial"]
