"""Agents: programs of the user's that ask the policy by OpenAI's API (docs/adr/0043)."""
