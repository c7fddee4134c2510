"""Networks that no rule was found on, tuned on or defended with: they are evidence only."""
