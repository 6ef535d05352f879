"""Moving average of the actor's weights."""
