for (const figure of document.querySelectorAll("script[type='application/json']")) {
  const {data, layout} = JSON.parse(figure.textContent);
  const place = document.getElementById(figure.dataset.place);
  Plotly.newPlot(place, data, layout, {responsive: true, displaylogo: false, plotlyServerURL: "", showLink: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]});
}
