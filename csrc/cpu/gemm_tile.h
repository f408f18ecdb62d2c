// The register tile of the GEMM, written once for all vector widths. Included by gemm_avx512.cc and
// its siblings after they have defined, in their own namespace, JAX_MOK_TARGET and a struct `Isa`:
//   Vector, kWidth (floats), kMostRows (rows of a tile), kVectors (vectors of a tile's row),
//   load, store, broadcast, zero, multiply_add (fused where the processor can).
// No include guard and no includes: code compiled here for a newer processor must not be shared
// with other files.

template <int kRows>
JAX_MOK_TARGET void tile(int64_t depth, const float* a, int64_t a_row, int64_t a_step,
                         const float* b, int64_t b_step, float* c, int64_t c_row, bool accumulate) {
  Isa::Vector sum[kRows][Isa::kVectors];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < Isa::kVectors; ++j)
      sum[i][j] = accumulate ? Isa::load(c + i * c_row + j * Isa::kWidth) : Isa::zero();
  for (int64_t k = 0; k < depth; ++k) {
    Isa::Vector row[Isa::kVectors];
    for (int j = 0; j < Isa::kVectors; ++j) row[j] = Isa::load(b + j * Isa::kWidth);
    for (int i = 0; i < kRows; ++i) {
      const Isa::Vector x = Isa::broadcast(a + i * a_row);
      for (int j = 0; j < Isa::kVectors; ++j)
        sum[i][j] = Isa::multiply_add(x, row[j], sum[i][j]);
    }
    a += a_step;
    b += b_step;
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < Isa::kVectors; ++j)
      Isa::store(c + i * c_row + j * Isa::kWidth, sum[i][j]);
}

// tile<rows> for a number of rows known only now.
template <int kRows>
JAX_MOK_TARGET void tile_of(int64_t rows, int64_t depth, const float* a, int64_t a_row,
                            int64_t a_step, const float* b, int64_t b_step, float* c, int64_t c_row,
                            bool accumulate) {
  if (rows == kRows) {
    tile<kRows>(depth, a, a_row, a_step, b, b_step, c, c_row, accumulate);
  } else if constexpr (kRows > 1) {
    tile_of<kRows - 1>(rows, depth, a, a_row, a_step, b, b_step, c, c_row, accumulate);
  }
}

JAX_MOK_TARGET void all_tiles(int64_t rows, int64_t depth, const float* a, int64_t a_row,
                              int64_t a_step, const float* b, int64_t b_step, float* c,
                              int64_t c_row, bool accumulate) {
  // Even pieces: 16 rows go as 8 + 8, not as 12 + 4, for a short tile keeps few sums in flight.
  const int64_t pieces = (rows + Isa::kMostRows - 1) / Isa::kMostRows;
  for (int64_t piece = 0, first = 0; piece < pieces; ++piece) {
    const int64_t count = (rows - first + pieces - piece - 1) / (pieces - piece);
    for (int64_t j = 0; j < kPanel; j += Isa::kWidth * Isa::kVectors)
      tile_of<Isa::kMostRows>(count, depth, a + first * a_row, a_row, a_step, b + j, b_step,
                              c + first * c_row + j, c_row, accumulate);
    first += count;
  }
}
