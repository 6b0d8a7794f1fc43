"""Extensions of Miles that are loaded by name: nothing in ``miles`` imports this package."""
