"""The planner: memory, time and price of a run, estimated before it starts."""
