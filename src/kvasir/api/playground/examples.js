// What a new conversation offers: messages that the served model can answer.

// What the model in the package can do; sent with temperature 0 unless one is set.
export const PACKAGED = [
  ["A chain of sums", "Compute modulo 97: start 12; +45; *3; -7; *2; +30."],
  ["The shortest way", "Roads: G K, M O, G C, T R, V I, R K, P C, K H, V N, V P, G T, N G, H I, T P, H O. Shortest way from M to I?"],
  ["An object as JSON", "Make a JSON object of old true, tags red and grey, items coat, hair blue."],
];

export const GENERAL = [
  ["A program", "Write a Python function that finds the longest word of a text, with two tests."],
  ["Mathematics", "Derive the solutions of a quadratic equation step by step, with formulas."],
  ["A table", "Compare TCP, UDP and QUIC in a table."],
];
