// lstm and gru in double precision, one sequence and one step at a time. The backward walks each
// sequence from its end; dh is what the outputs and states from the current step on make of h.
#include <cmath>
#include <vector>

#include "core/access.h"
#include "ops/rnn/problem.h"

namespace fk {
namespace reference {
namespace {

using Vector = std::vector<double>;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// A tensor's numbers as rows: (B, L, D) has B L rows, a vector is one row. A tensor that was not
// given has the shape that is asked for, and zeros.
struct Matrix {
  int64_t rows, columns;
  Vector values;

  Matrix(int64_t r, int64_t c) : rows(r), columns(c), values(r * c) {}
  Matrix(const Tensor& t, int64_t r, int64_t c) : Matrix(r, c) {
    for (int64_t i = 0; t && i < r * c; ++i) values[i] = load(t, place(t, i));
  }
  void store_to(const Tensor& t) const {
    for (int64_t i = 0; t && i < rows * columns; ++i) store(t, place(t, i), values[i]);
  }

  double* operator[](int64_t row) { return values.data() + row * columns; }
  const double* operator[](int64_t row) const { return values.data() + row * columns; }

  // Where the element of this number, counted along the rows, lies.
  static int64_t place(const Tensor& t, int64_t number) {
    int64_t at = 0;
    for (int d = t.ndim - 1; d >= 0; --d) {
      at += number % t.shape[d] * t.strides[d];
      number /= t.shape[d];
    }
    return at;
  }
};

// Rows [first, last) of a matrix times a vector, added to `out`.
void add_product(const Matrix& m, int64_t first, int64_t last, const double* v, double* out) {
  for (int64_t r = first; r < last; ++r) {
    for (int64_t c = 0; c < m.columns; ++c) out[r - first] += m[r][c] * v[c];
  }
}
// The transposed rows times a vector with an entry for each of them, added to `out`.
void add_transposed(const Matrix& m, int64_t first, int64_t last, const double* v, double* out) {
  for (int64_t r = first; r < last; ++r) {
    for (int64_t c = 0; c < m.columns; ++c) out[c] += m[r][c] * v[r - first];
  }
}
// The outer product of two vectors, added to rows [first, last).
void add_outer(const double* left, const double* right, int64_t first, int64_t last, Matrix* m) {
  for (int64_t r = first; r < last; ++r) {
    for (int64_t c = 0; c < m->columns; ++c) (*m)[r][c] += left[r - first] * right[c];
  }
}
void add(const double* from, int64_t count, double* to) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

// Of a sequence: the rows of tensors (B, L, ...) that its steps have, in the order of the walk.
std::vector<int64_t> rows_of_steps(const rnn::Problem& p, int64_t sequence) {
  const SequenceSteps s = p.sequences[sequence];
  std::vector<int64_t> rows;
  for (int64_t t = 0; t < s.end - s.begin; ++t) {
    rows.push_back(s.batch * p.length + p.position(s, t));
  }
  return rows;
}

// The arguments that a forward and its backward have in common.
struct Inputs {
  rnn::Problem p;
  Matrix x, w_ih, w_hh, h0;

  template <class Args>
  explicit Inputs(const Args& a)
      : p(rnn::problem_of(a)),
        x(a.x, p.positions(), p.inputs),
        w_ih(a.w_ih, p.gates * p.hidden, p.inputs),
        w_hh(a.w_hh, p.gates * p.hidden, p.outputs),
        h0(a.h0, p.sequences.count, p.outputs) {}
};

// The gradients that all steps have a share in.
struct Sums {
  Matrix dx, dw_ih, dw_hh, db_ih, db_hh, dh0;

  explicit Sums(const Inputs& in)
      : dx(in.x.rows, in.x.columns),
        dw_ih(in.w_ih.rows, in.w_ih.columns),
        dw_hh(in.w_hh.rows, in.w_hh.columns),
        db_ih(1, in.w_ih.rows),
        db_hh(1, in.w_ih.rows),
        dh0(in.h0.rows, in.h0.columns) {}

  // The share of a step in what has to do with x, from the gradient of its gates.
  void add_input(const Inputs& in, int64_t row, const Vector& dgates) {
    add_transposed(in.w_ih, 0, in.w_ih.rows, dgates.data(), dx[row]);
    add_outer(dgates.data(), in.x[row], 0, in.w_ih.rows, &dw_ih);
    add(dgates.data(), in.w_ih.rows, db_ih[0]);
  }

  template <class Args>
  void store_to(const Args& a) const {
    dx.store_to(a.dx);
    dw_ih.store_to(a.dw_ih);
    dw_hh.store_to(a.dw_hh);
    db_ih.store_to(a.db_ih);
    db_hh.store_to(a.db_hh);
    dh0.store_to(a.dh0);
  }
};

}  // namespace

Status run(const LstmFwd& a, const Exec&) {
  const Inputs in(a);
  const rnn::Problem& p = in.p;
  const int64_t H = p.hidden, R = p.outputs;
  const Matrix b_ih(a.b_ih, 1, 4 * H), b_hh(a.b_hh, 1, 4 * H), w_hr(a.w_hr, R, H);
  Matrix h(a.h0, p.sequences.count, R), c(a.c0, p.sequences.count, H);
  Matrix y(p.positions(), R), gates(p.positions(), 4 * H), cells(p.positions(), H);
  for (int64_t s = 0; s < p.sequences.count; ++s) {
    for (const int64_t row : rows_of_steps(p, s)) {
      double* const gate = gates[row];
      add(b_ih[0], 4 * H, gate);
      add(b_hh[0], 4 * H, gate);
      add_product(in.w_ih, 0, 4 * H, in.x[row], gate);
      add_product(in.w_hh, 0, 4 * H, h[s], gate);
      Vector m(H);
      for (int64_t u = 0; u < H; ++u) {
        double &i = gate[u], &f = gate[H + u], &g = gate[2 * H + u], &o = gate[3 * H + u];
        i = sigmoid(i), f = sigmoid(f), g = std::tanh(g), o = sigmoid(o);
        c[s][u] = cells[row][u] = f * c[s][u] + i * g;
        m[u] = o * std::tanh(c[s][u]);
      }
      if (a.w_hr) {
        add_product(w_hr, 0, R, m.data(), y[row]);
      } else {
        add(m.data(), H, y[row]);
      }
      for (int64_t r = 0; r < R; ++r) h[s][r] = y[row][r];
    }
  }
  y.store_to(a.y);
  h.store_to(a.h);
  c.store_to(a.c);
  gates.store_to(a.gates);
  cells.store_to(a.cells);
  return {};
}

Status run(const LstmBwd& a, const Exec&) {
  const Inputs in(a);
  const rnn::Problem& p = in.p;
  const int64_t H = p.hidden, R = p.outputs;
  const Matrix w_hr(a.w_hr, R, H), c0(a.c0, p.sequences.count, H), y(a.y, p.positions(), R);
  const Matrix gates(a.gates, p.positions(), 4 * H), cells(a.cells, p.positions(), H);
  const Matrix dy(a.dy, p.positions(), R);
  const Matrix dh_last(a.dh, p.sequences.count, R), dc_last(a.dc, p.sequences.count, H);
  Sums sums(in);
  Matrix dw_hr(R, H), dc0(p.sequences.count, H);
  for (int64_t s = 0; s < p.sequences.count; ++s) {
    const std::vector<int64_t> rows = rows_of_steps(p, s);
    Vector dh(dh_last[s], dh_last[s] + R), dc(dc_last[s], dc_last[s] + H);
    for (auto t = static_cast<int64_t>(rows.size()) - 1; t >= 0; --t) {
      const int64_t row = rows[t];
      const double* const gate = gates[row];
      const double* const h_before = t == 0 ? in.h0[s] : y[rows[t - 1]];
      const double* const c_before = t == 0 ? c0[s] : cells[rows[t - 1]];
      add(dy[row], R, dh.data());
      Vector dm(H), m(H), dgates(4 * H);
      if (a.w_hr) {
        add_transposed(w_hr, 0, R, dh.data(), dm.data());
      } else {
        dm = dh;
      }
      for (int64_t u = 0; u < H; ++u) {
        const double i = gate[u], f = gate[H + u], g = gate[2 * H + u], o = gate[3 * H + u];
        const double tanh_c = std::tanh(cells[row][u]);
        m[u] = o * tanh_c;
        dc[u] += dm[u] * o * (1 - tanh_c * tanh_c);
        dgates[u] = dc[u] * g * i * (1 - i);
        dgates[H + u] = dc[u] * c_before[u] * f * (1 - f);
        dgates[2 * H + u] = dc[u] * i * (1 - g * g);
        dgates[3 * H + u] = dm[u] * tanh_c * o * (1 - o);
        dc[u] *= f;
      }
      add_outer(dh.data(), m.data(), 0, R, &dw_hr);
      sums.add_input(in, row, dgates);
      add(dgates.data(), 4 * H, sums.db_hh[0]);
      add_outer(dgates.data(), h_before, 0, 4 * H, &sums.dw_hh);
      dh.assign(R, 0);
      add_transposed(in.w_hh, 0, 4 * H, dgates.data(), dh.data());
    }
    add(dh.data(), R, sums.dh0[s]);
    add(dc.data(), H, dc0[s]);
  }
  sums.store_to(a);
  dw_hr.store_to(a.dw_hr);
  dc0.store_to(a.dc0);
  return {};
}

Status run(const GruFwd& a, const Exec&) {
  const Inputs in(a);
  const rnn::Problem& p = in.p;
  const int64_t H = p.hidden;
  const Matrix b_ih(a.b_ih, 1, 3 * H), b_hh(a.b_hh, 1, 3 * H);
  Matrix h(a.h0, p.sequences.count, H);
  Matrix y(p.positions(), H), gates(p.positions(), 4 * H);
  for (int64_t s = 0; s < p.sequences.count; ++s) {
    for (const int64_t row : rows_of_steps(p, s)) {
      double *const r = gates[row], *const z = r + H, *const n = z + H, *const met = n + H;
      // r and z stand side by side.
      add(b_ih[0], 3 * H, r);
      add(b_hh[0], 2 * H, r);
      add_product(in.w_ih, 0, 3 * H, in.x[row], r);
      add_product(in.w_hh, 0, 2 * H, h[s], r);
      for (int64_t u = 0; u < 2 * H; ++u) r[u] = sigmoid(r[u]);
      if (a.reset_after) {
        add(b_hh[0] + 2 * H, H, met);
        add_product(in.w_hh, 2 * H, 3 * H, h[s], met);
        for (int64_t u = 0; u < H; ++u) n[u] += r[u] * met[u];
      } else {
        for (int64_t u = 0; u < H; ++u) met[u] = r[u] * h[s][u];
        add(b_hh[0] + 2 * H, H, n);
        add_product(in.w_hh, 2 * H, 3 * H, met, n);
      }
      for (int64_t u = 0; u < H; ++u) {
        n[u] = std::tanh(n[u]);
        h[s][u] = y[row][u] = (1 - z[u]) * n[u] + z[u] * h[s][u];
      }
    }
  }
  y.store_to(a.y);
  h.store_to(a.h);
  gates.store_to(a.gates);
  return {};
}

Status run(const GruBwd& a, const Exec&) {
  const Inputs in(a);
  const rnn::Problem& p = in.p;
  const int64_t H = p.hidden;
  const Matrix y(a.y, p.positions(), H), gates(a.gates, p.positions(), 4 * H);
  const Matrix dy(a.dy, p.positions(), H), dh_last(a.dh, p.sequences.count, H);
  Sums sums(in);
  for (int64_t s = 0; s < p.sequences.count; ++s) {
    const std::vector<int64_t> rows = rows_of_steps(p, s);
    Vector dh(dh_last[s], dh_last[s] + H);
    for (auto t = static_cast<int64_t>(rows.size()) - 1; t >= 0; --t) {
      const int64_t row = rows[t];
      const double *const r = gates[row], *const z = r + H, *const n = z + H, *const met = n + H;
      const double* const h_before = t == 0 ? in.h0[s] : y[rows[t - 1]];
      add(dy[row], H, dh.data());
      // The gradients of what the products with x and with h give, r, z and n side by side.
      Vector of_x(3 * H), of_h(3 * H);
      for (int64_t u = 0; u < H; ++u) {
        of_x[H + u] = dh[u] * (h_before[u] - n[u]) * z[u] * (1 - z[u]);
        of_x[2 * H + u] = dh[u] * (1 - z[u]) * (1 - n[u] * n[u]);
        dh[u] *= z[u];
      }
      Vector dmet(H);
      if (a.reset_after) {
        for (int64_t u = 0; u < H; ++u) dmet[u] = of_x[2 * H + u] * met[u];
      } else {
        add_transposed(in.w_hh, 2 * H, 3 * H, of_x.data() + 2 * H, dmet.data());
      }
      for (int64_t u = 0; u < H; ++u) {
        const double meets = a.reset_after ? 1 : h_before[u];
        of_x[u] = dmet[u] * meets * r[u] * (1 - r[u]);
        if (!a.reset_after) dh[u] += dmet[u] * r[u];
      }
      of_h = of_x;
      for (int64_t u = 0; a.reset_after && u < H; ++u) of_h[2 * H + u] *= r[u];
      sums.add_input(in, row, of_x);
      add(of_h.data(), 3 * H, sums.db_hh[0]);
      const int64_t with_h = a.reset_after ? 3 * H : 2 * H;
      add_outer(of_h.data(), h_before, 0, with_h, &sums.dw_hh);
      add_transposed(in.w_hh, 0, with_h, of_h.data(), dh.data());
      if (!a.reset_after) add_outer(of_h.data() + 2 * H, met, 2 * H, 3 * H, &sums.dw_hh);
    }
    add(dh.data(), H, sums.dh0[s]);
  }
  sums.store_to(a);
  return {};
}

}  // namespace reference
}  // namespace fk
