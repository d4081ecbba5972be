"""Make calibration text: prompts answered by a model and filtered, prompts alone, or plain text."""
