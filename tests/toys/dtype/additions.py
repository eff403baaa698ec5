"""bits16, torch's 16 bits without arithmetic, which the toy reduces as uint16.

torch converts no tensor to bits16, so the lists of tests/cases/reference.py, whose tests do so, do
not get it.
"""

SECTION = "A dtype"

EDITS = [
    ("csrc/core/types/dtype.h", "after", "  kFloat8E8M0FNU = 19,\n", "  kBits16 = 20,\n"),
    ("csrc/core/types/dtype.h", "instead", "kDTypeCount = 20;", "kDTypeCount = 21;"),
    (
        "csrc/core/types/dtype.cc",
        "after",
        '    {"float8_e8m0fnu", 1, Kind::kFloat8},\n',
        '    {"bits16", 2, Kind::kIntegral},\n',
    ),
    (
        "csrc/core/types/dtype.cc",
        "instead",
        "static_cast<int>(DType::kFloat8E8M0FNU) == kDTypeCount - 1",
        "static_cast<int>(DType::kBits16) == kDTypeCount - 1",
    ),
    (
        "csrc/torch/convert.cc",
        "after",
        "    {at::kFloat8_e8m0fnu, DType::kFloat8E8M0FNU},\n",
        "    {at::kBits16, DType::kBits16},\n",
    ),
    (
        "csrc/core/reduce/reduce.cc",
        "instead",
        "reduce_complex<double>};\n"
        "  static_assert(std::size(kKernels) == static_cast<size_t>(DType::kComplex128) + 1);\n",
        "reduce_complex<double>,\n"
        "      reduce_elements, reduce_elements, reduce_elements, reduce_elements,\n"
        "      reduce_elements,  // aborts, for float8\n"
        "      reduce_integers<uint16_t>};\n"
        "  static_assert(std::size(kKernels) == static_cast<size_t>(DType::kBits16) + 1);\n",
    ),
    (
        "csrc/core/reduce/reduce_scalar.cc",
        "instead",
        "reduce_complex<double>};\n"
        "  static_assert(std::size(kKernels) == static_cast<size_t>(DType::kComplex128) + 1);\n",
        "reduce_complex<double>,\n"
        "      refuse, refuse, refuse, refuse, refuse,  // float8\n"
        "      reduce_integers<uint16_t>};\n"
        "  static_assert(std::size(kKernels) == static_cast<size_t>(DType::kBits16) + 1);\n",
    ),
    (
        "csrc/core/reduce/reduce_scalar.cc",
        "before",
        "template <typename Element>\nvoid reduce_floating(",
        "void refuse(const Operands&, const Reduction&, int) { illegal_reduction(); }\n\n",
    ),
    (
        "tests/core/types_test.cc",
        "after",
        '      {DType::kFloat8E8M0FNU, "float8_e8m0fnu", 1},\n',
        '      {DType::kBits16, "bits16", 2},\n',
    ),
    (
        "tests/core/types_test.cc",
        "instead",
        "dtype >= DType::kUInt8 && dtype <= DType::kInt64",
        "(dtype >= DType::kUInt8 && dtype <= DType::kInt64) || dtype == DType::kBits16",
    ),
    (
        "tests/core/types_test.cc",
        "instead",
        "EXPECT_EQ(is_float8(dtype), dtype >= DType::kFloat8E4M3FN);",
        "EXPECT_EQ(is_float8(dtype),\n"
        "          dtype >= DType::kFloat8E4M3FN && dtype <= DType::kFloat8E8M0FNU);",
    ),
    (
        "tests/core/reduce_test.cc",
        "after",
        "  expect_integers_wrap<int64_t>(DType::kInt64);\n",
        "  expect_integers_wrap<uint16_t>(DType::kBits16);\n",
    ),
    (
        "tests/core/team_reference.h",
        "after",
        "    case DType::kInt16:\n",
        "    case DType::kBits16:\n",
    ),
    (
        "tests/cases/reference.py",
        "after",
        "        _SAME_BYTES[getattr(torch, _name)] = getattr(torch, _name[1:])\n",
        'if hasattr(torch, "bits16"):\n'
        "    _NUMPY[torch.bits16] = np.uint16\n"
        "    _SAME_BYTES[torch.bits16] = torch.int16\n",
    ),
    (
        "tests/random/values.py",
        "instead",
        'UNSIGNED = ["uint8", "uint16", "uint32", "uint64"]\n',
        'UNSIGNED = ["uint8", "uint16", "uint32", "uint64", "bits16"]\n',
    ),
    (
        "tests/random/values.py",
        "before",
        "    return torch.from_numpy(numbers[0].copy()).to(kind)\n",
        '    if dtype == "bits16":\n'
        "        return torch.from_numpy(numbers[0].astype(np.int16)).view(kind)\n",
    ),
    (
        "tests/random/values.py",
        "before",
        "    kind = getattr(torch, dtype)\n    room = count",
        '    if dtype == "bits16":\n'
        '        return blank("int16", count, layout, group).view(torch.bits16)\n',
    ),
    (
        "docs/c10d.md",
        "instead",
        "| | bool | int8 to int64, uint8 to uint64 |",
        "| | bool | int8 to int64, uint8 to uint64, bits16 |",
    ),
]

NOT_NEEDED = {
    "csrc/core/reduce/lanes_inl.h": "the lanes of uint16 fit",
    "csrc/core/types/reduce_op.cc": "it has the operators of every integer",
}

TESTS = "ToyDType.*:Types.*:Reduce*:ThreadTeam*:*ShmTeamRanks.EveryCollective/*"
