"""reasoning-gym's procedural tasks behind the environment protocol."""
