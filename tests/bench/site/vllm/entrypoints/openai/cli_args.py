"""Stand-in for the flags of vLLM's server."""


def make_arg_parser(parser):
    parser.add_argument("--data-parallel-size", type=int)
    for flag in ("--model", "--host", "--port", "--load-format", "--served-model-name", "--max-model-len"):
        parser.add_argument(flag)
    for flag in ("--disable-uvicorn-access-log", "--enable-prompt-tokens-details"):
        parser.add_argument(flag, action="store_true")
    return parser


def validate_parsed_serve_args(options):
    options.checked = True
