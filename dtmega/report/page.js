// In a narrow window the panels stand in one column instead of two: `narrow` is that layout of the same figure.
const phone = matchMedia("(max-width: 760px)");
const options = {responsive: true, displaylogo: false, plotlyServerURL: "", showLink: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]};
for (const script of document.querySelectorAll("script[type='application/json']")) {
  const {data, layout, narrow} = JSON.parse(script.textContent);
  const place = document.getElementById(script.dataset.place);
  const draw = () => Plotly.newPlot(place, data, phone.matches && narrow || layout, options);
  draw();
  phone.addEventListener("change", draw);
}
