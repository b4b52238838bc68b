"""What any engine for language models needs of skuda. A folder beside this one adapts it to an engine."""
