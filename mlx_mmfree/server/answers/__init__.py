"""What clients read: texts, probabilities and numbers of tokens, in OpenAI's form."""
