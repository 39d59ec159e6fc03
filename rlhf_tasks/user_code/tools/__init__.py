"""What a policy may call: the formats of calls, the schemas of tools, the episodes that answer calls."""
