"""Rewards that are not models: functions, HTTP endpoints and rules, each in its own process."""
