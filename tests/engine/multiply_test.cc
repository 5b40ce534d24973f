// Packed products of every weight type, on every instruction set, against plain sums in double.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "cpu/targets.h"
#include "engine/kernels.h"
#include "engine/pack.h"
#include "engine/quantize.h"

namespace fk::engine {
namespace {

using model::WeightType;

// Random blocks: any bytes, but scales that are ordinary numbers.
std::vector<uint8_t> random_blocks(WeightType type, int64_t count, std::mt19937& random) {
  const model::WeightTypeInfo& info = model::type_info(type);
  std::vector<uint8_t> bytes(static_cast<size_t>(count / info.block * info.bytes));
  std::normal_distribution<float> normal;
  if (type <= WeightType::kBF16) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& v : values) v = normal(random);
    if (type == WeightType::kF32) {
      std::memcpy(bytes.data(), values.data(), bytes.size());
    } else {
      narrow(type, values.data(), count, reinterpret_cast<uint16_t*>(bytes.data()));
    }
    return bytes;
  }
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
  for (int64_t i = 0; i < count / info.block; ++i) {
    uint8_t* block = bytes.data() + i * info.bytes;
    const bool last = type == WeightType::kQ6_K;
    const bool two = type == WeightType::kQ4_1 || type == WeightType::kQ5_1 ||
                     type == WeightType::kQ4_K || type == WeightType::kQ5_K;
    const uint16_t d = float_to_half(0.01f + 0.01f * static_cast<float>(random() % 100));
    const uint16_t m = float_to_half(normal(random));
    std::memcpy(block + (last ? info.bytes - 2 : 0), &d, 2);
    if (two) std::memcpy(block + 2, &m, 2);
  }
  return bytes;
}

struct Inputs {
  std::vector<float> x, scale, sum;
  std::vector<int8_t> q;
  std::vector<int32_t> minus32, minus16;
  Activations view;

  Inputs(int64_t tokens, int64_t columns, std::mt19937& random) {
    std::normal_distribution<float> normal;
    const auto blocks = static_cast<size_t>(tokens * columns / 32);
    x.resize(static_cast<size_t>(tokens * columns));
    for (float& v : x) v = normal(random);
    q.resize(x.size());
    scale.resize(blocks);
    sum.resize(blocks);
    minus32.resize(blocks);
    minus16.resize(2 * blocks);
    view = {columns, x.data(), q.data(), scale.data(), sum.data(), minus32.data(), minus16.data()};
    for (int64_t t = 0; t < tokens; ++t) quantize(view, t, 0, columns / 32);
  }
};

class Multiply : public testing::TestWithParam<WeightType> {};

TEST_P(Multiply, EqualsPlainSums) {
  const WeightType type = GetParam();
  std::mt19937 random(7);
  const int64_t rows = 40, columns = 512, tokens = 13;
  const std::vector<uint8_t> bytes = random_blocks(type, rows * columns, random);
  model::Weight weight;
  weight.data = bytes.data();
  weight.type = type;
  weight.rows = rows;
  weight.columns = columns;
  weight.row_bytes = static_cast<int64_t>(bytes.size()) / rows;
  std::vector<float> bias(48, 0.5f);
  PackedMatrix packed;
  packed.packing = packing_of(weight, nullptr);
  packed.rows = rows;
  packed.columns = columns;
  packed.bias = bias.data();
  std::vector<uint8_t> storage(static_cast<size_t>(packed.bytes()));
  packed.data = storage.data();
  pack_groups(weight, packed, 0, packed.groups());

  for (const std::string& target : cpu::supported_targets()) {
    for (const bool vnni : {true, false}) {
      ASSERT_TRUE(cpu::set_target(target.c_str()));
      cpu::set_vnni(vnni);
      Inputs in(tokens, columns, random);
      std::vector<float> out(static_cast<size_t>(tokens * 48), NAN);
      multiply(packed, 0, packed.groups(), in.view, tokens, out.data(), 48);
      std::vector<float> row(columns), alone(48);
      for (int64_t r = 0; r < rows; ++r) {
        model::dequantize(type, bytes.data() + r * weight.row_bytes, columns, row.data());
        for (int64_t t = 0; t < tokens; ++t) {
          double sum = 0.5, size = 0.5;
          for (int64_t k = 0; k < columns; ++k) {
            const auto i = static_cast<size_t>(t * columns + k);
            const double x = is_float(packed.packing)
                                 ? static_cast<double>(in.x[i])
                                 : static_cast<double>(in.scale[i / 32]) * in.q[i];
            sum += x * row[static_cast<size_t>(k)];
            size += std::fabs(x * row[static_cast<size_t>(k)]);
          }
          ASSERT_NEAR(out[static_cast<size_t>(t * 48 + r)], sum, 2e-6 * size)
              << target << " vnni " << vnni << " row " << r << " token " << t;
        }
      }
      // One token alone gives the same bits as among many.
      multiply(packed, 0, packed.groups(), in.view, 1, alone.data(), 48);
      for (size_t r = 0; r < rows; ++r) ASSERT_EQ(alone[r], out[r]) << target;
    }
  }
  cpu::set_target(nullptr);
  cpu::set_vnni(true);
}

INSTANTIATE_TEST_SUITE_P(AllTypes, Multiply,
                         testing::Values(WeightType::kF32, WeightType::kF16, WeightType::kBF16,
                                         WeightType::kQ8_0, WeightType::kQ4_0, WeightType::kQ4_1,
                                         WeightType::kQ5_0, WeightType::kQ5_1, WeightType::kQ4_K,
                                         WeightType::kQ5_K, WeightType::kQ6_K),
                         [](const auto& info) { return model::type_info(info.param).name; });

TEST(Quantize, RoundTripIsNear) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> x(256), back(256);
  for (float& v : x) v = normal(random);
  for (const auto& [type, error] : {std::pair{WeightType::kQ8_0, 0.02f},
                                    {WeightType::kQ5_0, 0.15f},
                                    {WeightType::kQ5_1, 0.1f},
                                    {WeightType::kQ4_0, 0.3f},
                                    {WeightType::kQ4_1, 0.2f}}) {
    std::vector<uint8_t> blocks(256 / 32 * model::type_info(type).bytes);
    quantize(type, x.data(), 256, blocks.data());
    model::dequantize(type, blocks.data(), 256, back.data());
    for (size_t i = 0; i < 256; ++i) ASSERT_NEAR(back[i], x[i], error);
  }
}

}  // namespace
}  // namespace fk::engine
