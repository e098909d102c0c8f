// Shows a message that was pushed to this browser, and opens its link.
self.addEventListener("push", (event) => {
  const { title, text, url, key } = event.data.json();
  // The same message again takes the place of the first.
  event.waitUntil(self.registration.showNotification(title, { body: text, tag: key, data: { url } }));
});

self.addEventListener("notificationclick", (event) => {
  event.notification.close();
  const { url } = event.notification.data;
  if (new URL(url).origin === self.location.origin) event.waitUntil(self.clients.openWindow(url));
});
