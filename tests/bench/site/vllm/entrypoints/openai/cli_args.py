"""Stand-in for the flags of vLLM's server."""


def make_arg_parser(parser):
    parser.add_argument("--data-parallel-size", type=int)
    return parser


def validate_parsed_serve_args(options):
    options.checked = True
