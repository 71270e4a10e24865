// The site opens from a folder, and browsers do not start workers for pages of a folder. The search needs a worker, so
// this file runs the worker's script in a hidden frame, which sends and receives the same messages.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const scope = frame.contentWindow
      scope.postMessage = data => {
        const event = new MessageEvent("message", { data })
        setTimeout(() => this.dispatchEvent(event))
      }
      this.loaded = new Promise((resolve, reject) => {
        const script = frame.contentDocument.createElement("script")
        script.src = new URL(url, location.href)
        script.onload = () => resolve(scope)
        script.onerror = reject
        frame.contentDocument.body.append(script)
      })
      this.frame = frame
    }

    postMessage(data) {
      const event = new MessageEvent("message", { data })
      this.loaded.then(scope => scope.dispatchEvent(event))
    }

    terminate() {
      this.frame.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
